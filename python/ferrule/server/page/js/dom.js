// Elements are made here and nowhere else, so that text stays text: nothing that a model or a file says is ever parsed
// as HTML. The policy that the server sends (Trusted Types) holds the page to it.

const SVG = "http://www.w3.org/2000/svg";

/** An element; functions among the attributes are listeners, what is null or false is left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for the elements of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Lets a text field grow with what is written, where the style sheet alone cannot. */
export function growing(area) {
  if (CSS.supports("field-sizing", "content")) return area;
  area.addEventListener("input", () => {
    area.style.setProperty("height", "auto");
    area.style.setProperty("height", `${area.scrollHeight}px`);
  });
  return area;
}

/** Whether whoever uses the page types on glass, where Enter has to be a new line. */
export function hasCoarsePointer() {
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
