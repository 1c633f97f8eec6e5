// Random identifiers. `crypto.randomUUID` requires https or localhost; the page must also work over http.

/** Returns a new identifier: 128 random bits as 32 hexadecimal digits. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
