// Conversations stay in this browser, in IndexedDB: localStorage ends at five megabytes, and a long answer with the
// alternatives of each token has one.

import { merge } from "./conversation.js";

const NAME = "ferrule";
const STORE = "conversations";
const LISTING = "listing";

const channel = new BroadcastChannel(NAME);
// Ids that were kept at a time: one that is there no more was deleted, and does not come back.
const known = new Set();
let opened = null;

/** Calls `changed(ids)` when another tab has kept or deleted conversations. */
export function onChange(changed) {
  channel.addEventListener("message", ({ data }) => changed(data));
}

/** Id, title and time of every conversation, the latest first; contents stay where they are. */
export async function list() {
  const found = [];
  await within("readonly", (store) => {
    store.index(LISTING).openKeyCursor(null, "prev").onsuccess = ({ target }) => {
      const cursor = target.result;
      if (!cursor) return;
      const [updated, title] = cursor.key;
      found.push({ id: cursor.primaryKey, updated, title });
      cursor.continue();
    };
  });
  return found;
}

/** The conversation with this id, or undefined. */
export async function load(id) {
  const found = await within("readonly", (store) => store.get(id));
  if (found) known.add(id);
  return found;
}

/** Every conversation with its contents. */
export async function loadAll() {
  return within("readonly", (store) => store.getAll());
}

/**
 * Keeps conversations as they are now, with what other tabs have kept of them: all, or on an error none. Those that were
 * deleted stay so.
 */
export async function save(...conversations) {
  const saved = [];
  await within("readwrite", (store) => {
    for (const conversation of conversations) {
      store.get(conversation.id).onsuccess = ({ target: { result: kept } }) => {
        if (!kept && known.has(conversation.id)) return;
        if (kept) merge(conversation, kept);
        store.put(conversation);
        saved.push(conversation.id);
      };
    }
  });
  for (const id of saved) known.add(id);
  channel.postMessage(saved);
}

/** Deletes a conversation. */
export async function remove(id) {
  known.add(id);
  await within("readwrite", (store) => store.delete(id));
  channel.postMessage([id]);
}

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      const store = request.result.createObjectStore(STORE, { keyPath: "id" });
      store.createIndex(LISTING, ["updated", "title"]);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function within(mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}
