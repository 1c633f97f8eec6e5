// Maps rendered text back to the tokens of its Markdown source, so that each token has its own elements.

import { el } from "./dom.js";

/** Finds rendered text in its Markdown source, from left to right, and splits it into elements of tokens. */
export class TokenSpans {
  #text;
  #positions;
  #cursor = 0;
  #next = 0;

  /**
   * `positions` are those of `locateTokens` in tokens.js; without them text is not split. The search begins at the
   * offset `start` of the source.
   */
  constructor(text, positions, start) {
    this.#text = text;
    this.#positions = positions;
    this.#cursor = start;
  }

  /** Calls `render` with the cursor at the start of `raw`, and moves the cursor to its end; returns the result. */
  within(raw, render) {
    const at = this.#text.indexOf(raw, this.#cursor);
    if (at < 0) return render();
    this.#cursor = at;
    const result = render();
    this.#cursor = Math.max(this.#cursor, at + raw.length);
    return result;
  }

  /** Returns the nodes of a rendered text, whose lines may be indented in the source. */
  text(rendered) {
    if (this.#positions.length === 0) return [document.createTextNode(rendered)];
    return rendered.split(/(?<=\n)/).flatMap((line) => this.#line(line));
  }

  /** Returns the nodes of a text that replaces `raw`, such as an entity or an escaped character. */
  replaced(raw, rendered) {
    const at = this.#text.indexOf(raw, this.#cursor);
    if (at < 0) return [document.createTextNode(rendered)];
    this.#cursor = at + raw.length;
    const token = this.#positions.find(({ end }) => end > at);
    return [token ? tokenElement(token, rendered) : document.createTextNode(rendered)];
  }

  /** Returns the level of the least certain token of `raw`, such as of a formula; null without tokens. */
  level(raw) {
    const at = this.#text.indexOf(raw, this.#cursor);
    if (at < 0) return null;
    const tokens = this.#positions.filter(({ start, end }) => end > at && start < at + raw.length);
    return tokens.length > 0 ? Math.max(...tokens.map(({ level }) => level)) : null;
  }

  #line(line) {
    const start = this.#text.indexOf(line, this.#cursor);
    if (start < 0) return [document.createTextNode(line)];
    const end = start + line.length;
    this.#cursor = end;
    const nodes = [];
    let at = start;
    while (this.#next > 0 && this.#positions[this.#next - 1].end > start) this.#next--;
    while (this.#next < this.#positions.length && this.#positions[this.#next].end <= start) this.#next++;
    for (let i = this.#next; i < this.#positions.length && this.#positions[i].start < end; i++) {
      const token = this.#positions[i];
      const tokenEnd = Math.min(token.end, end);
      nodes.push(tokenElement(token, this.#text.slice(at, tokenEnd)));
      at = tokenEnd;
    }
    if (at < end) nodes.push(document.createTextNode(this.#text.slice(at, end)));
    return nodes;
  }
}

function tokenElement({ index, level }, text) {
  return el("span", { class: "token", "data-token": index, "data-certainty": level }, text);
}
