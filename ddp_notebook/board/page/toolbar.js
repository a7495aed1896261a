// The toolbar: always the same buttons in the same places.

const KEYS = { F8: "continue", F10: "step", F11: "into", "Shift+F11": "out" };

/** The button that a key stands for. */
export const stepOf = ({ key, shiftKey, ctrlKey, altKey, metaKey }) => (ctrlKey || altKey || metaKey ? undefined : KEYS[`${shiftKey ? "Shift+" : ""}${key}`]);

class Toolbar {
  constructor(page) {
    this.page = page;
    this.el = make("div", { class: "ddpb-toolbar ddpb-actions", role: "toolbar", "aria-label": "What can be done" });
  }

  draw(actions, busy) {
    this.el.hidden = !actions.length;
    const focused = this.el.contains(document.activeElement) && document.activeElement.dataset.name;
    show(this.el, [actions, busy, [...this.page.chosen]], () => actions.map((action) => this.button(action, busy)));
    if (focused) this.el.querySelector(`[data-name="${focused}"]`)?.focus();
  }

  button(action, busy) {
    const magic = magicFor(action, this.page.chosen);
    const enough = action.name === "restart" && this.page.chosen.size > 0 && action.why_not.startsWith("choose");
    const whyNot = busy.includes(magic) ? "running" : enough ? "" : action.why_not;
    const key = Object.keys(KEYS).find((each) => KEYS[each] === action.name);
    return make(
      "button",
      {
        class: "ddpb-action",
        type: "button",
        "data-name": action.name,
        "aria-disabled": String(Boolean(whyNot)),
        "aria-label": `${action.label} ${magic}`,
        "aria-keyshortcuts": key,
        title: `${magic}${whyNot ? `: ${whyNot}` : ""}${key ? ` (${key})` : ""}`,
        onclick: () => whyNot || this.page.act(magic),
      },
      action.label,
    );
  }
}
