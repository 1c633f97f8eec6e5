// The IndexedDB database of the page: conversations and presets. The limit of localStorage, 5 MB, is too small: a long
// answer with the alternatives of all tokens has 1 MB.

export const DATABASE = "ferrule";
export const CONVERSATIONS = "conversations";
export const PRESETS = "presets";
/** Index of the conversations by time and title, which lists them without loading their messages. */
export const LISTING = "listing";
/** Index of the pinned conversations. */
export const PINNED = "pinned";

const VERSION = 3;
// Changes of the database, by the version that they lead to. An older database keeps its contents.
const UPGRADES = {
  1: (database) => {
    database.createObjectStore(CONVERSATIONS, { keyPath: "id" }).createIndex(LISTING, ["updated", "title"]);
  },
  2: (database, transaction) => {
    database.createObjectStore(PRESETS, { keyPath: "name" });
    transaction.objectStore(CONVERSATIONS).createIndex(PINNED, "pinned");
  },
  // Conversations have their tokens as a text from now on (stored-tokens.js), which earlier pages cannot read. They are
  // converted when they are saved.
  3: () => {},
};
let opening = null;

/** Runs `act(store)` in a transaction and resolves to the result of the request that it returns. */
export async function transact(name, mode, act) {
  const database = await openDatabase();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(name, mode);
    const request = act(transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request?.result);
    // A failed request aborts its transaction, which has an error only then.
    transaction.onabort = () => reject(transaction.error ?? new Error("the database was closed"));
  });
}

function openDatabase() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      for (let version = oldVersion + 1; version <= VERSION; version++) {
        UPGRADES[version](request.result, request.transaction);
      }
    };
    request.onblocked = () => reject(new Error("another tab shows an older version of this page; reload it"));
    request.onsuccess = () => {
      // A newer version of the page in another tab can change the database; this tab must be reloaded then.
      request.result.onversionchange = () => request.result.close();
      // The browser closes a database when the user deletes its data.
      request.result.onclose = () => (opening = null);
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
  }).catch((error) => {
    // The next transaction tries again.
    opening = null;
    throw error;
  });
  return opening;
}
