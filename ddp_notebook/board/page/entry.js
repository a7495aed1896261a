// The entry for anywidget: one store of a model, a board for each of its views.

/** Run `act`; an error is shown, and the picture without scripts comes back. */
function guarded(el, page, act) {
  try {
    act();
  } catch (error) {
    page?.el.remove();
    console.error(error);
    el.replaceChildren(
      make("div", { class: "ddpb ddpb-broken", role: "alert" }, `The live board does not work here; below is the board as it was when this cell ended. Now: %ddp_status. ${error?.name ?? ""}: ${error?.message ?? error}`),
    );
    return false;
  }
  return true;
}

export default () => {
  const store = new Store(); // of one model, shared by its views
  const pages = new Set();

  function receive(model, message) {
    if (message.values) Object.assign((store.state ??= {}), message.values);
    let taken = message.kind === "state";
    if (message.kind === "slices") {
      store.resize((store.state?.board ?? model.get("board")).world_size);
      taken = store.take(message);
    }
    store.count(message.told, taken, message.whole);
    if (message.life) store.life = message.life;
    for (const page of pages) {
      page.received(message.now);
      if (message.kind === "took") page.asked = null;
      if (message.values) page.draw();
      if (message.kind === "past" && message.view === page.view && !page.timeline.window.follow) {
        page.past = { ...message.board, findings: message.findings, locations: message.locations };
        page.draw();
      }
      page.timeline.touch();
    }
  }

  return {
    initialize({ model }) {
      store.told = model.get("told");
      model.on("change:told", () => store.count(model.get("told"), true));
      model.on("msg:custom", (message) => receive(model, message));
    },

    render({ model, el }) {
      let page = null;
      let alive = true;
      const names = ["board", "findings", "locations", "stops", "actions", "benchmark", "busy", "answers"];
      const guard = (act) => alive && (alive = guarded(el, page, act));
      const draw = () => guard(() => {
        page.received(model.get("board").now);
        page.draw();
      });
      guard(() => {
        page = new Page(model, store, guard);
        store.resize(model.get("board").world_size);
        pages.add(page);
        el.replaceChildren(page.el, page.moved);
        names.forEach((name) => model.on(`change:${name}`, draw));
        hearAlways(model, model.get("still")).then(() => guard(() => page.askForAll()));
      });
      const key = (event) => guard(() => page.key(event));
      const released = () => setTimeout(() => guard(() => page.draw()));
      document.addEventListener("keydown", key);
      document.addEventListener("pointerup", released);
      const clock = setInterval(() => guard(() => page.tick()), 1000);
      // Drawn at first when it is in the page, and again when it becomes visible.
      const sized = new ResizeObserver(() => guard(() => page.draw()));
      if (page) sized.observe(page.el);
      return () => {
        alive = false;
        clearInterval(clock);
        document.removeEventListener("keydown", key);
        document.removeEventListener("pointerup", released);
        sized.disconnect();
        names.forEach((name) => model.off(`change:${name}`, draw));
        pages.delete(page);
      };
    },
  };
};
