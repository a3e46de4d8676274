/** How things look that the chat page shows, whatever they mean. Texts are only ever set as text, and never as HTML. */

export function element(name, className) {
  const made = document.createElement(name);
  made.className = className;
  return made;
}

/** A screen reader announces a status whenever it is set. */
export function setText(shown, text) {
  if (shown.textContent !== text) shown.textContent = text;
}

/** Give `parent` a child for each key, in this order. Children that are there already are kept, and moved if needed. */
export function place(parent, keys, make) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, index) => {
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = make(index);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  old.forEach((child) => child.remove());
}

/** A colour for each name, for the elements that use `--hue`. */
export function paint(shown, name) {
  const hue = [...name].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) % 360, 7);
  shown.style.setProperty("--hue", hue);
}

export function paintAvatar(avatar, name, letter = [...name][0] ?? "") {
  avatar.textContent = letter;
  paint(avatar, name);
}

export function shortTime(at) {
  const date = new Date(at);
  return date.toDateString() === new Date().toDateString()
    ? date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

export function longTime(at) {
  const date = new Date(at);
  const time = date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${shortTime(at)}, ${time}`;
}

export function dayElement(at) {
  const shown = element("div", "day");
  shown.textContent = new Date(at).toLocaleDateString(undefined, { weekday: "long", day: "numeric", month: "long" });
  return shown;
}

const TICKS = {
  waiting: ["M8.5 1.5a4 4 0 1 0 .01 0M8.5 3.5v2.2l1.5 1"],
  sent: ["M5 6l3 3 6-7"],
  delivered: ["M1 6l3 3 6-7", "M7.5 8.5l.5.5 6-7"],
};

export function ticks(state) {
  const shown = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  shown.setAttribute("class", `ticks is-${state}`);
  shown.setAttribute("viewBox", "0 0 15 11");
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", state);
  for (const line of TICKS[state] ?? TICKS.delivered) {
    shown.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path")).setAttribute("d", line);
  }
  return shown;
}
