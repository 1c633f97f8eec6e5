// Conversations as a file, and back. A file is a stranger's: whatever is taken from it has been looked at.

import { FORMAT } from "./conversation.js";
import { el } from "./dom.js";
import { identifier } from "./identifier.js";
import { ALTERNATIVES, ownField, PARAMETERS } from "./parameters.js";

const KIND = "ferrule conversations";
const ROLES = ["user", "assistant"];
const IDENTIFIER = /^[0-9a-f]{32}$/;

/** Hands conversations to the browser as a file to be saved. */
export function download(conversations, name) {
  const text = JSON.stringify({ kind: KIND, format: FORMAT, conversations }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const plain = name.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  el("a", { href: url, download: `${plain || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** The conversations of a file's text, as new ones; throws an Error that names what is wrong and where. */
export function readFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  expect(file?.kind === KIND, "kind", `“${KIND}”`);
  expect(file.format === FORMAT, "format", String(FORMAT));
  expect(Array.isArray(file.conversations), "conversations", "a list");
  return file.conversations.map((conversation, at) => readConversation(conversation, `conversations[${at}]`));
}

function readConversation(read, where) {
  expect(isObject(read), where, "an object");
  expect(isObject(read.nodes), `${where}.nodes`, "an object");
  const nodes = {};
  for (const [id, node] of Object.entries(read.nodes)) nodes[id] = readNode(node, id, `${where}.nodes.${id}`);
  for (const [id, { parent }] of Object.entries(nodes)) {
    // A parent comes before its children, so that no line of parents runs in a circle.
    const known = parent === null || (Object.hasOwn(nodes, parent) && nodes[parent].order < nodes[id].order);
    expect(known, `${where}.nodes.${id}.parent`, "a node that stands before it");
  }
  for (const node of Object.values(nodes)) delete node.order;
  const chosen = isObject(read.chosen) ? Object.entries(read.chosen).filter(([, id]) => Object.hasOwn(nodes, id)) : [];
  return {
    format: FORMAT,
    id: identifier(),
    title: string(read.title, `${where}.title`),
    created: number(read.created, `${where}.created`),
    updated: number(read.updated, `${where}.updated`),
    model: read.model === null ? null : string(read.model, `${where}.model`),
    system: string(read.system, `${where}.system`),
    parameters: readParameters(read.parameters, `${where}.parameters`),
    nodes,
    chosen: Object.fromEntries(chosen),
  };
}

let order = 0;

function readNode(node, id, where) {
  const isNamed = IDENTIFIER.test(id) && isObject(node) && node.id === id;
  expect(isNamed, where, "an object with this id, of 32 hexadecimal digits");
  expect(ROLES.includes(node.role), `${where}.role`, ROLES.join(" or "));
  const base = {
    id,
    order: order++,
    parent: node.parent === null ? null : string(node.parent, `${where}.parent`),
    role: node.role,
    content: string(node.content, `${where}.content`),
    created: number(node.created, `${where}.created`),
  };
  if (node.role === "user") return base;
  const { error } = node;
  return {
    ...base,
    model: node.model === null ? null : string(node.model, `${where}.model`),
    reasoning: string(node.reasoning, `${where}.reasoning`),
    tokens: readTokens(node.tokens, `${where}.tokens`),
    figures: isObject(node.figures) ? numbersOf(node.figures) : null,
    finish: typeof node.finish === "string" ? node.finish : "stopped",
    ...(isObject(error) && { error: { message: string(error.message, `${where}.error.message`), status: null } }),
  };
}

function readTokens(tokens, where) {
  expect(Array.isArray(tokens), where, "a list");
  return tokens.map((token, at) => {
    const here = `${where}[${at}]`;
    expect(isObject(token) && Array.isArray(token.top), here, "an object with a list “top”");
    const top = token.top.map((other) => {
      expect(Array.isArray(other), `${here}.top`, "a list of pairs");
      return [string(other[0], `${here}.top`), number(other[1], `${here}.top`)];
    });
    return { text: string(token.text, `${here}.text`), logprob: number(token.logprob, `${here}.logprob`), top };
  });
}

function readParameters(read, where) {
  expect(isObject(read), where, "an object");
  const parameters = {};
  for (const { name } of [...PARAMETERS, ALTERNATIVES]) {
    if (read[name] !== undefined) parameters[name] = number(read[name], `${where}.${name}`);
  }
  if (read.stop !== undefined) {
    expect(Array.isArray(read.stop), `${where}.stop`, "a list");
    parameters.stop = read.stop.map((text) => string(text, `${where}.stop`));
  }
  if (isObject(read.further)) {
    const own = ownField(read.further);
    expect(!own, `${where}.further`, `without ${own}, which the page sets`);
    parameters.further = read.further;
  }
  return parameters;
}

function numbersOf(object) {
  return Object.fromEntries(Object.entries(object).filter(([, value]) => Number.isFinite(value)));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function string(value, where) {
  expect(typeof value === "string", where, "text");
  return value;
}

function number(value, where) {
  expect(Number.isFinite(value), where, "a number");
  return value;
}

function expect(holds, where, wanted) {
  if (!holds) throw new Error(`The file cannot be read: ${where} has to be ${wanted}.`);
}
