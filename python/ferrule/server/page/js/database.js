// The saved conversations.

import { merge } from "./conversation.js";
import { CONVERSATIONS, DATABASE, LISTING, PINNED, transact } from "./indexed-db.js";
import { excerpt, matches, wordsOf } from "./search.js";
import { pack, unpack, unpackNode } from "./stored-tokens.js";

const channel = new BroadcastChannel(DATABASE);
// Ids that have been in the database. One that is missing now was deleted by another tab and is not saved again.
const savedIds = new Set();
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
  await transact(CONVERSATIONS, "readonly", (store) => {
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
  const found = await transact(CONVERSATIONS, "readonly", (store) => store.get(id));
  if (!found) return undefined;
  savedIds.add(id);
  return unpack(found);
}

/** Returns all conversations. */
export async function loadAll() {
  return (await transact(CONVERSATIONS, "readonly", (store) => store.getAll())).map(unpack);
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
 * deleted.
 */
export async function save(...conversations) {
  const ids = [];
  await transact(CONVERSATIONS, "readwrite", (store) => {
    for (const conversation of conversations) {
      store.get(conversation.id).onsuccess = ({ target: { result: saved } }) => {
        if (!saved && savedIds.has(conversation.id)) return;
        if (saved) merge(conversation, saved, unpackNode);
        store.put(pack(conversation));
        ids.push(conversation.id);
      };
    }
  });
  for (const id of ids) savedIds.add(id);
  forgetTexts(ids);
  channel.postMessage(ids);
}

/** Deletes a conversation. */
export async function remove(id) {
  savedIds.add(id);
  await transact(CONVERSATIONS, "readwrite", (store) => store.delete(id));
  forgetTexts([id]);
  channel.postMessage([id]);
}

async function readTexts() {
  await transact(CONVERSATIONS, "readonly", (store) => {
    store.getAllKeys().onsuccess = ({ target: { result: ids } }) => {
      for (const id of ids) if (!texts.has(id)) store.get(id).onsuccess = ({ target }) => keepTexts(target.result);
    };
  });
}

function keepTexts({ id, nodes }) {
  const attached = ({ attachments = [] }) => attachments.flatMap(({ name, text }) => [name, text]);
  texts.set(id, Object.values(nodes).flatMap((node) => [node.content, ...attached(node)]));
}

function forgetTexts(ids) {
  for (const id of ids) texts.delete(id);
}
