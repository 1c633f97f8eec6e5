// A conversation is a tree: to edit a message, or to ask again, adds a sibling and loses nothing. What is shown is the
// path from the root through the children that were chosen last.
//
//   {format, id, title, created, updated, model, system, parameters, nodes: {id: node}, chosen: {parent: child}}
//   node: {id, parent, role, content, created} and of answers {reasoning, tokens, model, figures, finish, error}

import { identifier } from "./identifier.js";

export const FORMAT = 1;
const ROOT = "";
const TITLE_LENGTH = 60;

/** An empty conversation with these settings, for example those of another one; it is kept once something was said. */
export function newConversation({ model = null, system = "", parameters = {} } = {}) {
  const now = Date.now();
  return {
    format: FORMAT,
    id: identifier(),
    title: "",
    created: now,
    updated: now,
    model,
    system,
    parameters: { ...parameters },
    nodes: {},
    chosen: {},
  };
}

/** Adds a node below `parent` (null: at the root), shows it, and returns it. */
export function append(conversation, parent, fields) {
  const node = { id: identifier(), parent, created: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.updated = node.created;
  if (conversation.title === "" && node.role === "user") conversation.title = titleOf(node.content);
  choose(conversation, node);
  return node;
}

/** Takes away a node that has nothing below it. */
export function discard(conversation, node) {
  delete conversation.nodes[node.id];
}

/**
 * Takes over from another copy of a conversation, of another tab, what was said there: nodes that this one has not, and
 * of one that both have the copy that is further. A version that is shown here stays the one that is shown.
 */
export function merge(conversation, other) {
  const { nodes } = conversation;
  let added = false;
  for (const node of Object.values(other.nodes)) {
    const here = nodes[node.id];
    if (here) {
      if (isFurther(node, here)) Object.assign(here, node);
      // A failed answer without text is removed before the next attempt.
    } else if (!(node.error && node.content === "")) {
      nodes[node.id] = node;
      added = true;
    }
  }
  if (added) {
    const byAge = Object.values(nodes).sort((one, two) => one.created - two.created);
    conversation.nodes = Object.fromEntries(byAge.map((node) => [node.id, node]));
  }
  conversation.chosen = { ...other.chosen, ...conversation.chosen };
  conversation.updated = Math.max(conversation.updated, other.updated);
}

// An answer grows until it has ended; "stopped" may be what a tab that did not write it took it for.
function isFurther(one, two) {
  const length = ({ content, reasoning = "" }) => content.length + reasoning.length;
  const end = ({ finish }) => (finish === null ? 0 : finish === "stopped" ? 1 : 2);
  return length(one) !== length(two) ? length(one) > length(two) : end(one) > end(two);
}

/** Says of answers that were cut off with the page they were written on that they were. */
export function settle(conversation) {
  for (const node of Object.values(conversation.nodes)) if (node.finish === null) node.finish = "stopped";
  return conversation;
}

/** The nodes below one (null: at the root), the oldest first. */
export function children(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent);
}

/** A node and those beside it, the oldest first. */
export function siblings(conversation, node) {
  return children(conversation, node.parent);
}

/** Shows the branch of this node. */
export function choose(conversation, node) {
  conversation.chosen[node.parent ?? ROOT] = node.id;
}

/** The nodes shown, from the first message on. */
export function path(conversation) {
  const byParent = Map.groupBy(Object.values(conversation.nodes), (node) => node.parent);
  const shown = [];
  let parent = null;
  while (byParent.has(parent)) {
    const chosen = conversation.chosen[parent ?? ROOT];
    const below = byParent.get(parent);
    const node = below.find(({ id }) => id === chosen) ?? below.at(-1);
    shown.push(node);
    parent = node.id;
  }
  return shown;
}

/** The nodes from the first message to this one. */
export function ancestry(conversation, node) {
  const line = [];
  for (let at = node; at; at = at.parent === null ? null : conversation.nodes[at.parent]) line.unshift(at);
  return line;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].trim();
  return line.length <= TITLE_LENGTH ? line : `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…`;
}
