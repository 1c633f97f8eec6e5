// crypto.randomUUID exists on https and on this machine alone; the page is also read over plain http, from another one.

/** A fresh identifier of 128 random bits. */
export function identifier() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
