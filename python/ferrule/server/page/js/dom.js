// All elements are created here, so that text is never parsed as HTML. The content security policy of the server
// (Trusted Types) enforces it.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element; attributes that are functions become listeners, null and false are omitted. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Creates an SVG element, like `el`. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Returns the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Makes a text field grow with its text in browsers without `field-sizing`; returns the field. */
export function autoGrow(area) {
  if (CSS.supports("field-sizing", "content")) return area;
  area.addEventListener("input", () => {
    area.style.setProperty("height", "auto");
    area.style.setProperty("height", `${area.scrollHeight}px`);
  });
  return area;
}

/** Returns whether the main input device is a touch screen, whose keyboard has no Shift+Enter. */
export function hasTouchScreen() {
  return matchMedia("(pointer: coarse)").matches;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
