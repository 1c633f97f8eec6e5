// Emphasis beside Chinese, Japanese and Korean text. In CommonMark, marks between punctuation and a letter neither begin
// nor end emphasis, as in **注意。**请勿. These scripts have no spaces there, so that the marks are emphasis here.

const EMPHASIS = /^(\*{1,2})(?![\s*])([^*\n]{1,1000})(?<!\s)\1(?!\*)/u;
const LETTER = "[\\p{Script=Han}\\p{Script=Hiragana}\\p{Script=Katakana}\\p{Script=Hangul}]";
const BEGINS_WITH_LETTER = new RegExp(`^${LETTER}`, "u");
const ENDS_WITH_LETTER = new RegExp(`${LETTER}$`, "u");

/** Extension of the lexer of the marked library for inline tokens. */
export function cjkEmphasis(source, tokens) {
  const [raw, marks, text] = EMPHASIS.exec(source) ?? [];
  if (raw === undefined) return undefined;
  const isClosing = /\p{P}$/u.test(text) && BEGINS_WITH_LETTER.test(source.slice(raw.length));
  const isOpening = /^\p{P}/u.test(text) && ENDS_WITH_LETTER.test(tokens.at(-1)?.raw ?? "");
  if (!isClosing && !isOpening) return undefined;
  return { type: marks.length === 2 ? "strong" : "em", raw, text, tokens: this.lexer.inlineTokens(text) };
}
