// The page's side of the line above a running cell's output.
const BUTTONS = [["Where?", "%ddp_where"], ["Abort", "%ddp_abort"]];
const ASK_AFTER_MS = 7000;  // the kernel says something every 5 s
const SILENT_AFTER_MS = 20000;
const ENDED = "It did not finish: the kernel ended, and the ranks with it.";
const STYLE = `
.ddpl { font: var(--jp-ui-font-size1, 13px)/1.6 var(--jp-ui-font-family, system-ui, sans-serif);
  color: var(--jp-ui-font-color1, inherit); width: 100%; padding: 2px 0 }
.ddpl-row { display: flex; gap: 8px; align-items: baseline }
.ddpl-text { min-width: 0; overflow-wrap: anywhere }
.ddpl-clock { white-space: nowrap; font-variant-numeric: tabular-nums; min-width: 3.5em }
.ddpl button { font: inherit; line-height: 1.3; color: inherit; cursor: pointer; padding: 0 9px;
  border: 1px solid rgba(128, 128, 128, 0.6); border-radius: 4px; white-space: nowrap;
  background: var(--jp-layout-color0, transparent) }
.ddpl button:disabled { opacity: 0.6; cursor: default }
.ddpl button:focus-visible { outline: 2px solid #0067ad; outline-offset: 1px }
.ddpl pre { margin: 4px 0; max-height: 22em; overflow: auto; white-space: pre-wrap;
  line-height: 1.35; font-size: 0.92em; padding: 4px 8px; background: rgba(128, 128, 128, 0.1) }
.ddpl [hidden] { display: none }`;

const made = (tag, name, text = "") => {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
};

const duration = (seconds) => seconds < 60 ? `${Math.floor(seconds)} s`
  : `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;

const clockTime = (at) => at.toLocaleTimeString();

export default {
  render({ model, el }) {
    const root = made("div", "ddpl");
    const row = made("div", "ddpl-row");
    const clock = made("span", "ddpl-clock");
    const text = made("span", "ddpl-text");
    const answer = made("div", "ddpl-answer");
    text.setAttribute("role", "status");
    let real, cut = false;  // a restart of the kernel closes the way to it, and is not always marked
    const send = (message) => {
      try { model.send(message); } catch { cut = true; }
    };
    const buttons = BUTTONS.map(([label, magic]) => {
      const button = made("button", "", label);
      button.type = "button";
      button.title = magic;
      button.onclick = () => { send({ kind: "do", magic }); tick(); };
      return [button, magic];
    });
    row.append(clock, ...buttons.map(([button]) => button), text);
    const still = `.ddpl-still-${model.get("stand_in")} { display: none }`;
    root.append(made("style", "", STYLE + still), row, answer);
    el.append(root);
    hearAlways(model, model.get("stand_in")).then((found) => { real = found; send({ kind: "hello" }); });
    let heard = Date.now();
    let asked = heard;
    let shown = 0;  // the number of the newest answer that was drawn
    let closed = 0;

    const tick = () => {
      // Jupyter marks a widget so whose kernel has ended or was restarted.
      const over = model.get("over");
      cut ||= real?.comm?.jsServicesComm?.isDisposed;
      if (!over && Date.now() - Math.max(heard, asked) > ASK_AFTER_MS) {
        asked = Date.now();
        send({ kind: "here" });
      }
      const ended = !over && (!!cut || root.closest(".jupyter-widgets-disconnected") !== null);
      const silent = ended || Date.now() - heard > SILENT_AFTER_MS;
      const seconds = model.get("age_s") + (Date.now() - heard) / 1000;
      clock.hidden = over || silent;
      clock.textContent = duration(seconds);
      const lost = `${model.get("text")} · the kernel was last heard at ${clockTime(new Date(heard))}`;
      const words = ended ? ENDED : silent && !over ? lost : model.get("text");
      if (text.textContent !== words) text.textContent = words;
      for (const [button, magic] of buttons) {
        button.hidden = over || silent;
        button.disabled = model.get("busy").includes(magic);
      }
    };
    const drawAnswer = () => {
      // What Abort gives is seen by what the cell shows; what went wrong with it is not.
      const newest = model.get("answers").find(({ magic, ok }) => magic === "%ddp_where" || !ok);
      if (!newest || newest.number === shown || newest.number === closed) return;
      shown = newest.number;
      const head = made("div", "ddpl-row");
      const close = made("button", "", "Close");
      close.type = "button";
      close.onclick = () => { closed = shown; answer.replaceChildren(); };
      head.append(made("span", "", `${newest.magic} at ${newest.at}`), close);
      answer.replaceChildren(head, made("pre", "", newest.text));
    };
    const received = () => { heard = Date.now(); tick(); };
    const draw = () => { tick(); drawAnswer(); };
    model.on("change:text change:age_s change:over", received);
    model.on("change:busy change:answers", draw);
    draw();
    const timer = setInterval(tick, 1000);
    return () => {
      clearInterval(timer);
      model.off("change:text change:age_s change:over", received);
      model.off("change:busy change:answers", draw);
    };
  },
};
