// What the page asks of the server: the models, and an answer as a stream. Paths are relative, so that the page works
// wherever it is mounted.

import { recall, remember } from "./remembered.js";
import { events } from "./sse.js";

const KEY = "ferrule-api-key";
const CUT = "The stream ended before the answer did.";

/** What the server, or the way to it, said no with; `message` is the server's text. */
export class ServerError extends Error {
  constructor(message, { status = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ServerError";
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** Keeps the key for this tab: it is forgotten with it. */
export function setApiKey(key) {
  remember("tab", KEY, key);
}

/** The models that can be asked: `{id, max_model_len, …}`. */
export async function listModels() {
  const response = await ask("v1/models");
  return (await response.json()).data;
}

/** Yields the chunks of an answer; ends early where `signal` aborts, with an AbortError. */
export async function* streamChat(request, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let done = false;
  // Read to its end: to leave behind the last word would be a disconnect.
  for await (const data of unbroken(events(response.body))) {
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { status: chunk.error.code, param: chunk.error.param });
    yield chunk;
  }
  if (!done) throw new ServerError(CUT);
}

/** What comes of a stream; a connection that breaks is a ServerError, as each browser has other words for it. */
async function* unbroken(stream) {
  try {
    yield* stream;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(CUT);
  }
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  const key = recall("tab", KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  const about = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = JSON.parse(text);
    return new ServerError(error.message, { ...about, param: error.param });
  } catch {
    return new ServerError(text || response.statusText || `HTTP ${response.status}`, about);
  }
}
