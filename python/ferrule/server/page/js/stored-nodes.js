// The stored form of the nodes of a conversation, which has the tokens of an answer as one JSON text. The browser copies
// a text at once, but the lists of the alternatives one by one.

// The saved states of nodes, by which a conversation is saved without the nodes that have not changed.
const savedStates = new WeakMap();

/** Returns the stored form of a node. */
export function packNode(node) {
  return node.tokens ? { ...node, tokens: JSON.stringify(node.tokens) } : node;
}

/** Restores the tokens of a stored node in place, and returns it. */
export function unpackNode(node) {
  if (node.tokens) node.tokens = JSON.parse(node.tokens);
  markSaved(node, stateOf(node));
  return node;
}

/** Returns whether a node has changed since it was saved or read. */
export function hasChanged(node) {
  return savedStates.get(node) !== stateOf(node);
}

/** Returns the state of a node: a text that differs after each change. Texts and tokens of an answer only grow. */
export function stateOf({ content, reasoning, tokens, statistics, contextStart, finishReason, error }) {
  const lengths = [content.length, reasoning?.length, tokens?.length];
  return JSON.stringify([lengths, statistics, contextStart, finishReason, error]);
}

/** Records that a node was saved in this state. */
export function markSaved(node, state) {
  savedStates.set(node, state);
}
