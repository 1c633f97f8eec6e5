// Requests to the server: the list of models, the size of a prompt, the text of a PDF file, and an answer as a stream.
// Paths are relative, so that the page works below any prefix.

import { events } from "./sse.js";
import { readStorage, writeStorage } from "./storage.js";

const API_KEY = "ferrule-api-key";
const TRUNCATED = "The connection was closed before the answer was complete.";

/** An error response of the server, or a failed connection; `message` is the server's text. */
export class ServerError extends Error {
  constructor(message, { status = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ServerError";
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** Stores the API key until the tab is closed. */
export function setApiKey(key) {
  writeStorage("session", API_KEY, key);
}

/** Returns the available models: `{id, max_model_len, …}`. */
export async function listModels() {
  const response = await request("v1/models");
  return (await response.json()).data;
}

/** Returns the number of tokens of the prompt of a chat request. */
export async function countTokens(chat, signal) {
  const names = ["model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"];
  const fields = Object.fromEntries(names.filter((name) => name in chat).map((name) => [name, chat[name]]));
  const response = await request("tokenize", { method: "POST", body: JSON.stringify(fields), signal });
  return (await response.json()).count;
}

/** Returns the text of a PDF file: `{text, pages, truncated}`. */
export async function extractPdfText(file) {
  const response = await request("page/pdf-text", { method: "POST", body: file }, "application/pdf");
  return response.json();
}

/** Yields the chunks of an answer; throws an AbortError when `signal` aborts, and a ServerError on failure. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let done = false;
  // The stream is read to its end, because the server treats an earlier close as a disconnect.
  for await (const data of withServerErrors(events(response.body))) {
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { status: chunk.error.code, param: chunk.error.param });
    yield chunk;
  }
  if (!done) throw new ServerError(TRUNCATED);
}

/** Replaces the error of an interrupted connection, whose message differs between browsers, by a ServerError. */
async function* withServerErrors(stream) {
  try {
    yield* stream;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(TRUNCATED);
  }
}

async function request(path, options = {}, contentType = "application/json") {
  const headers = { "Content-Type": contentType };
  const key = readStorage("session", API_KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("Cannot connect to the server.");
  }
  if (!response.ok) throw await responseError(response);
  return response;
}

async function responseError(response) {
  const text = await response.text();
  const details = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = JSON.parse(text);
    return new ServerError(error.message, { ...details, param: error.param });
  } catch {
    return new ServerError(text || response.statusText || `HTTP ${response.status}`, details);
  }
}
