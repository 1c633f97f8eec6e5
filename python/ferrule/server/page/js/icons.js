// Icons: line drawings of 16 by 16 in the color of the surrounding text.

import { el, svg } from "./dom.js";

const PATHS = {
  alternatives: "M2 8h4m0 0c3 0 2-5 5-5h3M6 8h8M6 8c3 0 2 5 5 5h3",
  attach: "m13 7.5-5.2 5.2a3 3 0 0 1-4.3-4.3l5.6-5.6a2 2 0 0 1 2.9 2.9L6.6 11a1 1 0 0 1-1.4-1.4L10 4.9",
  certainty: "M2 12h3V8H2zM6.5 12h3V4h-3zM11 12h3V6h-3z",
  check: "m3 8.5 3.5 3.5L13 4.5",
  close: "m4 4 8 8M12 4l-8 8",
  compare: "M2 3h5v10H2zM9 3h5v10H9z",
  continue: "M3 8h7m0 0L7 5m3 3-3 3M13 3v10",
  copy: "M6 6V3h7v7h-3M3 6h7v7H3z",
  document: "M4 2h5l3 3v9H4zM9 2v3h3M6 8h4M6 10.5h4",
  edit: "m3 13 .6-3L11 2.6 13.4 5 6 12.4zM9.6 4l2.4 2.4",
  enlarge: "M9.5 2.5h4v4M13.5 2.5l-5 5M6.5 13.5h-4v-4M2.5 13.5l5-5",
  export: "M8 10V2m0 0L5 5m3-3 3 3M3 9v4h10V9",
  import: "M8 2v8m0 0L5 7m3 3 3-3M3 9v4h10V9",
  next: "m6 3 5 5-5 5",
  pin: "M5.5 2h5M6.5 2v4.5L4 9.5h8L9.5 6.5V2M8 9.5V14",
  previous: "M10 3 5 8l5 5",
  regenerate: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  remove: "M3 4.5h10M6.5 4.5v-2h3v2M4.5 4.5l.6 9h5.8l.6-9",
  save: "M3 3h8l2 2v8H3zM5.5 3v3h4V3M5.5 13V9h5v4",
  share: "M4 2h5.5L13 5.5V14H4zM6.5 8.5h4M6.5 11h4",
  send: "M8 13V3m0 0L4 7m4-4 4 4",
  stop: "M4.5 4.5h7v7h-7z",
};

/** Creates an icon; screen readers skip it, so its button needs a label. */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

/** Creates a button with an icon and a label; with `iconOnly` the label is a tooltip. */
export function button(name, label, click, { iconOnly = false, ...attributes } = {}) {
  return el(
    "button",
    { type: "button", click, title: iconOnly ? label : null, "aria-label": iconOnly ? label : null, ...attributes },
    icon(name),
    iconOnly ? null : el("span", {}, label),
  );
}
