// Elements of the page: made, and replaced only when what they show changes.

/** An element; children are elements or text, and text stays text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child || child === 0));
  return element;
}

/**
 * Children are replaced only when what they show changed: focus and open details stay. What is being
 * pressed stays until it is released, when all is drawn again: else the click would be lost.
 */
function show(element, key, children) {
  const shown = JSON.stringify(key);
  if (element.shownKey === shown || element.querySelector("button:active")) return false;
  element.shownKey = shown;
  element.replaceChildren(...[children()].flat(2).filter(Boolean));
  return true;
}

/** A remark below a title, or where there is nothing yet. */
const hint = (text) => make("p", { class: "ddpb-hint" }, text);

/** A sign that says what the word beside it says: no one needs to hear it. */
const sign = (text) => make("span", { class: "ddpb-mark", "aria-hidden": "true" }, text);

const small = (attributes, text) => make("button", { class: "ddpb-small", type: "button", ...attributes }, text);

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const focused = document.activeElement;
    const area = make("textarea", { class: "ddpb-copying" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
}

async function copyAndSay(text, button) {
  await copy(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

const copyButton = (text, of) =>
  small({ "aria-label": `Copy ${of}`, onclick: (e) => copyAndSay(text, e.currentTarget) }, "Copy");
