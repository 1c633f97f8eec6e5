// The stored form of a conversation, which has the tokens of each answer as one JSON text. The browser copies a text at
// once, but the lists of the alternatives one by one, which takes seconds for a long conversation. A text is cached for
// its list of tokens, so that saving a conversation creates only the text of the answer that has changed.

// The texts of lists of tokens: {text, count}. The tokens of a running answer are appended to its list.
const texts = new WeakMap();

/** Returns the stored form of a conversation. */
export function pack(conversation) {
  const nodes = Object.entries(conversation.nodes).map(([id, node]) => [id, packNode(node)]);
  return { ...conversation, nodes: Object.fromEntries(nodes) };
}

/** Restores the tokens of a stored conversation in place, and returns it. */
export function unpack(stored) {
  for (const node of Object.values(stored.nodes)) unpackNode(node);
  return stored;
}

/** Restores the tokens of a stored node in place, and returns it. Earlier versions of the page stored the list. */
export function unpackNode(node) {
  if (typeof node.tokens !== "string") return node;
  const text = node.tokens;
  node.tokens = JSON.parse(text);
  texts.set(node.tokens, { text, count: node.tokens.length });
  return node;
}

function packNode(node) {
  return node.tokens ? { ...node, tokens: textOf(node.tokens) } : node;
}

function textOf(tokens) {
  const cached = texts.get(tokens);
  if (cached?.count === tokens.length) return cached.text;
  const text = JSON.stringify(tokens);
  texts.set(tokens, { text, count: tokens.length });
  return text;
}
