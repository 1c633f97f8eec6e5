// The IndexedDB database of the page: conversations, their nodes, and presets. The limit of localStorage, 5 MB, is too
// small: a long answer with the alternatives of all tokens has 1 MB.

import { packNode } from "./stored-nodes.js";

export const DATABASE = "ferrule";
/** Store of the conversations, with the ids of their nodes in `order` instead of the nodes. */
export const CONVERSATIONS = "conversations";
/** Store of the nodes, by the ids of the conversation and of the node, so that a changed node is saved alone. */
export const NODES = "nodes";
export const PRESETS = "presets";
/** Index of the conversations by time and title, which lists them without loading their messages. */
export const LISTING = "listing";
/** Index of the pinned conversations. */
export const PINNED = "pinned";

const VERSION = 4;
// Changes of the database, by the version that they lead to. An older database keeps its contents.
const UPGRADES = {
  1: (database) => {
    database.createObjectStore(CONVERSATIONS, { keyPath: "id" }).createIndex(LISTING, ["updated", "title"]);
  },
  2: (database, transaction) => {
    database.createObjectStore(PRESETS, { keyPath: "name" });
    transaction.objectStore(CONVERSATIONS).createIndex(PINNED, "pinned");
  },
  // Until version 2 the tokens of an answer were stored as a list, in version 3 as a text.
  4: (database, transaction) => {
    const nodes = database.createObjectStore(NODES);
    transaction.objectStore(CONVERSATIONS).openCursor().onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      // A damaged conversation must not make the others inaccessible.
      const { nodes: contents = {}, ...head } = cursor.value;
      for (const [id, node] of Object.entries(contents)) {
        nodes.put(Array.isArray(node.tokens) ? packNode(node) : node, [head.id, id]);
      }
      cursor.update({ ...head, order: Object.keys(contents) });
      cursor.continue();
    };
  },
};
let opening = null;

/**
 * Runs `act` with these stores in a transaction, and resolves to its result once the transaction is complete. `act` may
 * be asynchronous if it waits only for requests of the transaction. An exception of `act` aborts the transaction.
 */
export async function transact(names, mode, act) {
  const database = await openDatabase();
  const transaction = database.transaction(names, mode);
  const completed = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    // A failed request aborts its transaction, which has an error only then.
    transaction.onabort = () => reject(transaction.error ?? new Error("the database was closed"));
  });
  const [result] = await Promise.all([run(transaction, names, act), completed]);
  return result;
}

async function run(transaction, names, act) {
  try {
    return await act(...names.map((name) => transaction.objectStore(name)));
  } catch (error) {
    try {
      transaction.abort();
    } catch {
      // It has been aborted, for example because the database was closed.
    }
    throw error;
  }
}

/** Resolves to the result of a request. */
export function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function openDatabase() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      for (let version = oldVersion + 1; version <= VERSION; version++) {
        UPGRADES[version]?.(request.result, request.transaction);
      }
    };
    request.onblocked = () => reject(new Error("another tab shows an older version of this page; reload it"));
    request.onsuccess = () => {
      // Another tab deletes the database, or has a newer version of the page that changes it.
      request.result.onversionchange = () => {
        request.result.close();
        opening = null;
      };
      // The browser closes a database when the user deletes its data.
      request.result.onclose = () => (opening = null);
      resolve(request.result);
    };
    request.onerror = () => {
      const { error } = request;
      const newer = "a newer version of this page has changed the database; reload this tab";
      reject(error.name === "VersionError" ? new Error(newer) : error);
    };
  }).catch((error) => {
    // The next transaction tries again.
    opening = null;
    throw error;
  });
  return opening;
}
