// Which part of an answer's source a rendered word came from: the way from a word on the screen to its token.

import { el } from "./dom.js";

/** Finds rendered text in its markdown source, left to right, and cuts it where tokens end. */
export class Source {
  #text;
  #placed;
  #cursor = 0;
  #next = 0;

  /** `placed` is what `place` in tokens.js says; without tokens text stays in one piece. The search begins at `from`. */
  constructor(text, placed, from) {
    this.#text = text;
    this.#placed = placed;
    this.#cursor = from;
  }

  /** Runs `inside` where `raw` stands, and goes on behind it. */
  within(raw, inside) {
    const at = this.#text.indexOf(raw, this.#cursor);
    if (at < 0) return inside();
    this.#cursor = at;
    const result = inside();
    this.#cursor = Math.max(this.#cursor, at + raw.length);
    return result;
  }

  /** The nodes for a rendered text; its lines may be indented in the source. */
  text(rendered) {
    if (this.#placed.length === 0) return [document.createTextNode(rendered)];
    return rendered.split(/(?<=\n)/).flatMap((line) => this.#line(line));
  }

  /** The nodes for text that the source writes as `raw`: an entity, an escaped character. */
  written(raw, rendered) {
    const at = this.#text.indexOf(raw, this.#cursor);
    if (at < 0) return [document.createTextNode(rendered)];
    this.#cursor = at + raw.length;
    const token = this.#placed.find(({ end }) => end > at);
    return [token ? span(token.index, rendered) : document.createTextNode(rendered)];
  }

  #line(line) {
    const at = this.#text.indexOf(line, this.#cursor);
    if (at < 0) return [document.createTextNode(line)];
    const end = at + line.length;
    this.#cursor = end;
    const nodes = [];
    let done = at;
    while (this.#next > 0 && this.#placed[this.#next - 1].end > at) this.#next--;
    while (this.#next < this.#placed.length && this.#placed[this.#next].end <= at) this.#next++;
    for (let i = this.#next; i < this.#placed.length && this.#placed[i].start < end; i++) {
      const token = this.#placed[i];
      const until = Math.min(token.end, end);
      nodes.push(span(token.index, this.#text.slice(done, until)));
      done = until;
    }
    if (done < end) nodes.push(document.createTextNode(this.#text.slice(done, end)));
    return nodes;
  }
}

function span(index, text) {
  return el("span", { class: "token", "data-token": index }, text);
}
