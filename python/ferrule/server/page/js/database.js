// The saved conversations.

import { merge } from "./conversation.js";
import { CONVERSATIONS, DATABASE, LISTING, NODES, PINNED, resultOf, transact } from "./indexed-db.js";
import { excerpt, matches, wordsOf } from "./search.js";
import { hasChanged, markSaved, packNode, stateOf, unpackNode } from "./stored-nodes.js";

const channel = new BroadcastChannel(DATABASE);
// Ids that have been in the database. One that is missing now was deleted by another tab and is not saved again.
const savedIds = new Set();
// The settings of conversations when they were read or saved, as texts by name. A tab keeps those of other tabs that it
// has not changed.
const savedSettings = new WeakMap();
const SETTINGS = ["title", "model", "system", "parameters", "pinned"];
// Texts of the messages of each conversation, read by the first search after a change.
const texts = new Map();
let reading = Promise.resolve();

channel.addEventListener("message", ({ data }) => forgetTexts(data));

/** Calls `listener(ids)` when another tab has saved or deleted conversations. */
export function onChange(listener) {
  channel.addEventListener("message", ({ data }) => listener(data));
}

/** Returns `{id, title, updated, isPinned}` of all conversations, latest first, without loading their messages. */
export async function list() {
  const entries = [];
  let pinned = new Set();
  await transact([CONVERSATIONS], "readonly", (store) => {
    store.index(PINNED).getAllKeys().onsuccess = ({ target }) => (pinned = new Set(target.result));
    store.index(LISTING).openKeyCursor(null, "prev").onsuccess = ({ target }) => {
      const cursor = target.result;
      if (!cursor) return;
      const [updated, title] = cursor.key;
      entries.push({ id: cursor.primaryKey, updated, title });
      cursor.continue();
    };
  });
  return entries.map((entry) => ({ ...entry, isPinned: pinned.has(entry.id) }));
}

/** Returns the conversation with this id, or undefined. */
export async function load(id) {
  const [found] = await read(id);
  if (found) savedIds.add(id);
  return found && unpack(found);
}

/** Returns all conversations. */
export async function loadAll() {
  return (await read()).map(unpack);
}

/** Resolves to `{head, nodes}` of a conversation or of all, with the stored nodes in their order. */
function read(id) {
  return transact([CONVERSATIONS, NODES], "readonly", async (heads, nodes) => {
    const found = await resultOf(heads.getAll(id));
    return Promise.all(found.map(async (head) => ({ head, nodes: await readNodes(head, nodes) })));
  });
}

async function readNodes({ id, order }, store) {
  const byId = new Map((await resultOf(store.getAll(nodesOf(id)))).map((node) => [node.id, node]));
  return order.map((node) => byId.get(node)).filter(Boolean);
}

// The range of the keys of a conversation's nodes: a list follows all texts.
function nodesOf(id) {
  return IDBKeyRange.bound([id], [id, []]);
}

function unpack({ head: { order, ...fields }, nodes }) {
  const conversation = { ...fields, nodes: Object.fromEntries(nodes.map((node) => [node.id, unpackNode(node)])) };
  markSettings(conversation, textsOfSettings(conversation));
  return conversation;
}

/** Adopts the settings of another tab's copy, except those that have changed here since they were saved. */
export function adoptSettings(conversation, saved) {
  const adopted = unchangedSettings(conversation, saved);
  Object.assign(conversation, adopted);
  markSettings(conversation, textsOfSettings(conversation, Object.keys(adopted)));
}

// Returns the settings of another copy that have not changed here since they were saved.
function unchangedSettings(conversation, other) {
  const changed = changedSettings(conversation);
  return Object.fromEntries(SETTINGS.filter((name) => !changed.includes(name)).map((name) => [name, other[name]]));
}

function changedSettings(conversation) {
  const saved = savedSettings.get(conversation);
  return SETTINGS.filter((name) => !saved || saved[name] !== JSON.stringify(conversation[name]));
}

function textsOfSettings(conversation, names = SETTINGS) {
  return Object.fromEntries(names.map((name) => [name, JSON.stringify(conversation[name])]));
}

function markSettings(conversation, texts) {
  savedSettings.set(conversation, { ...savedSettings.get(conversation), ...texts });
}

/** Returns an excerpt, by id, of each conversation that has a message with all words of the query. */
export async function search(query) {
  const words = wordsOf(query);
  if (words.length === 0) return new Map();
  // One after the other, so that fast typing does not read the conversations several times.
  reading = reading.then(readTexts, readTexts);
  await reading;
  const found = new Map();
  for (const [id, contents] of texts) {
    const text = contents.find((content) => matches(content, words));
    if (text !== undefined) found.set(id, excerpt(text, words));
  }
  return found;
}

/**
 * Saves conversations in one transaction, merged with the copies that other tabs have saved. Deleted conversations stay
 * deleted. Only the nodes that have changed are written.
 */
export async function save(...conversations) {
  const saved = await transact([CONVERSATIONS, NODES], "readwrite", (heads, nodes) =>
    Promise.all(conversations.map((conversation) => saveOne(conversation, heads, nodes))),
  );
  for (const [node, state] of saved.flatMap(({ written }) => written)) markSaved(node, state);
  for (const [each, settings] of saved.flatMap(({ changed }) => changed)) markSettings(each, settings);
  const ids = saved.flatMap(({ id }) => id);
  for (const id of ids) savedIds.add(id);
  forgetTexts(ids);
  channel.postMessage(ids);
}

// Resolves to lists of the id, of the written nodes with their states, and of the conversation with the texts of its
// changed settings. The lists are empty if the conversation was deleted.
async function saveOne(conversation, heads, nodes) {
  const { id } = conversation;
  const get = (node) => resultOf(nodes.get([id, node]));
  const changed = Object.values(conversation.nodes).filter(hasChanged);
  const [head, ...copies] = await Promise.all([resultOf(heads.get(id)), ...changed.map((node) => get(node.id))]);
  if (!head && savedIds.has(id)) return { id: [], written: [], changed: [] };
  const order = new Set(head?.order);
  if (head) {
    const unknown = [...order].filter((node) => !Object.hasOwn(conversation.nodes, node));
    const found = [...copies, ...(await Promise.all(unknown.map(get)))].filter(Boolean);
    merge(conversation, { ...head, nodes: Object.fromEntries(found.map((node) => [node.id, node])) }, unpackNode);
  }
  const { nodes: current, ...fields } = conversation;
  // Another tab may have removed a node that has not changed here.
  const written = Object.values(current).filter((node) => changed.includes(node) || !order.has(node.id));
  for (const node of written) nodes.put(packNode(node), [id, node.id]);
  for (const node of order) if (!Object.hasOwn(current, node)) nodes.delete([id, node]);
  const settings = textsOfSettings(conversation, changedSettings(conversation));
  heads.put({ ...fields, ...(head ? unchangedSettings(conversation, head) : {}), order: Object.keys(current) });
  return {
    id: [id],
    written: written.map((node) => [node, stateOf(node)]),
    changed: [[conversation, settings]],
  };
}

/** Deletes a conversation. */
export async function remove(id) {
  savedIds.add(id);
  await transact([CONVERSATIONS, NODES], "readwrite", (heads, nodes) => {
    heads.delete(id);
    nodes.delete(nodesOf(id));
  });
  forgetTexts([id]);
  channel.postMessage([id]);
}

async function readTexts() {
  await transact([CONVERSATIONS, NODES], "readonly", async (heads, nodes) => {
    const found = await resultOf(heads.getAll());
    const unread = found.filter(({ id }) => !texts.has(id));
    await Promise.all(unread.map(async (head) => texts.set(head.id, textsOf(await readNodes(head, nodes)))));
  });
}

function textsOf(nodes) {
  const attached = ({ attachments = [] }) => attachments.flatMap(({ name, text }) => [name, text]);
  return nodes.flatMap((node) => [node.content, ...attached(node)]);
}

function forgetTexts(ids) {
  for (const id of ids) texts.delete(id);
}
