// Line drawings of 16 by 16, in the colour of the text around them.

import { el, svg } from "./dom.js";

const PATHS = {
  add: "M8 3v10M3 8h10",
  alternatives: "M2 8h4m0 0c3 0 2-5 5-5h3M6 8h8M6 8c3 0 2 5 5 5h3",
  back: "M10 3 5 8l5 5",
  check: "m3 8.5 3.5 3.5L13 4.5",
  close: "m4 4 8 8M12 4l-8 8",
  copy: "M6 6V3h7v7h-3M3 6h7v7H3z",
  edit: "m3 13 .6-3L11 2.6 13.4 5 6 12.4zM9.6 4l2.4 2.4",
  export: "M8 10V2m0 0L5 5m3-3 3 3M3 9v4h10V9",
  forward: "m6 3 5 5-5 5",
  import: "M8 2v8m0 0L5 7m3 3 3-3M3 9v4h10V9",
  keys: "M1.5 4h13v8h-13zM4 6.5h.01M6.7 6.5h.01M9.4 6.5h.01M12 6.5h.01M5 9.6h6",
  list: "M2 4h12M2 8h12M2 12h8",
  more: "M3 8h7m0 0L7 5m3 3-3 3M13 3v10",
  regenerate: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  remove: "M3 4.5h10M6.5 4.5v-2h3v2M4.5 4.5l.6 9h5.8l.6-9",
  send: "M8 13V3m0 0L4 7m4-4 4 4",
  settings: "M2 5h6m3 0h3M2 11h2m3 0h7M9.5 3.5v3M5.5 9.5v3",
  stop: "M4.5 4.5h7v7h-7z",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
};

/** The drawing of this name; the button that holds it says in words what it does. */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

/** A button with a drawing; `label` is read out, and shown beside it unless `quiet`. */
export function button(name, label, click, { quiet = false, ...attributes } = {}) {
  return el(
    "button",
    { type: "button", click, title: quiet ? label : null, "aria-label": quiet ? label : null, ...attributes },
    icon(name),
    quiet ? null : el("span", {}, label),
  );
}
