// Data of a conversation. It is a tree: an edited message and a regenerated answer are siblings of the original. The
// visible messages are the path from the root through the selected children.
//
//   {format, id, title, created, updated, model, system, parameters, nodes: {id: node}, selected: {parent: child},
//    pinned: 1 if it is pinned}
//   node: {id, parent, role, content, created}
//   message: a node with {attachments: [{name, text}]}
//   answer: a node with {reasoning, tokens, model, statistics, finishReason, error, contextStart}
//
// `contextStart` is the id of the first message that was sent, or null if all were.

import { newId } from "./identifier.js";

export const FORMAT = 1;
const ROOT = "";
const MAX_TITLE_LENGTH = 60;

/** Creates an empty conversation with these settings; it is saved with its first message. */
export function newConversation({ model = null, system = "", parameters = {} } = {}) {
  const now = Date.now();
  return {
    format: FORMAT,
    id: newId(),
    title: "",
    created: now,
    updated: now,
    model,
    system,
    parameters: { ...parameters },
    nodes: {},
    selected: {},
  };
}

/** Adds a node below `parent` (null for the root), selects it, and returns it. */
export function append(conversation, parent, fields) {
  const node = { id: newId(), parent, created: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.updated = node.created;
  if (conversation.title === "" && node.role === "user") {
    conversation.title = titleOf(node.content) || titleOf(node.attachments?.[0]?.name ?? "");
  }
  select(conversation, node);
  return node;
}

/** Returns whether a node has children. */
export function hasChildren(conversation, { id }) {
  return Object.values(conversation.nodes).some(({ parent }) => parent === id);
}

/** Removes a node without children. */
export function removeNode(conversation, node) {
  delete conversation.nodes[node.id];
}

/**
 * Adds the nodes of another tab's copy of a conversation. Where both copies have a node, the more complete one is kept.
 * The selection of this copy has precedence. `adopt(node)` converts a node of the other copy that is used.
 */
export function merge(conversation, other, adopt = (node) => node) {
  const { nodes } = conversation;
  let added = false;
  for (const node of Object.values(other.nodes)) {
    const local = nodes[node.id];
    if (local) {
      if (isMoreComplete(node, local)) Object.assign(local, adopt(node));
      // A failed answer without text is removed before the next attempt, unless the conversation continues below it.
    } else if (!(node.error && node.content === "") || hasChildren(other, node)) {
      nodes[node.id] = adopt(node);
      added = true;
    }
  }
  if (added) {
    const byAge = Object.values(nodes).sort((one, two) => one.created - two.created);
    conversation.nodes = Object.fromEntries(byAge.map((node) => [node.id, node]));
  }
  conversation.selected = { ...other.selected, ...conversation.selected };
  conversation.updated = Math.max(conversation.updated, other.updated);
}

// An answer grows until it ends. A tab that loads an answer of another tab marks it "stopped", so that any other finish
// reason has precedence.
function isMoreComplete(one, two) {
  const length = ({ content, reasoning = "" }) => content.length + reasoning.length;
  const progress = ({ finishReason }) => (finishReason === null ? 0 : finishReason === "stopped" ? 1 : 2);
  return length(one) !== length(two) ? length(one) > length(two) : progress(one) > progress(two);
}

/** Marks answers as stopped whose page was closed during generation; returns the conversation. */
export function markInterrupted(conversation) {
  for (const node of Object.values(conversation.nodes)) if (node.finishReason === null) node.finishReason = "stopped";
  return conversation;
}

/** Returns a node and its siblings, oldest first. */
export function siblings(conversation, { parent }) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent);
}

/** Selects a node among its siblings. */
export function select(conversation, node) {
  conversation.selected[node.parent ?? ROOT] = node.id;
}

/** Returns the visible nodes, starting with the first message. */
export function path(conversation) {
  const byParent = Map.groupBy(Object.values(conversation.nodes), (node) => node.parent);
  const visible = [];
  let parent = null;
  while (byParent.has(parent)) {
    const selected = conversation.selected[parent ?? ROOT];
    const children = byParent.get(parent);
    const node = children.find(({ id }) => id === selected) ?? children.at(-1);
    visible.push(node);
    parent = node.id;
  }
  return visible;
}

/** Returns the nodes from the first message to this one. */
export function ancestors(conversation, node) {
  const nodes = [];
  for (let at = node; at; at = at.parent === null ? null : conversation.nodes[at.parent]) nodes.unshift(at);
  return nodes;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].trim();
  return line.length <= MAX_TITLE_LENGTH ? line : `${line.slice(0, MAX_TITLE_LENGTH - 1).trimEnd()}…`;
}
