// The page put together: what is shown, and what each action does to it.

import { answers } from "./answers.js";
import { composer } from "./composer.js";
import { append, choose, discard, merge, newConversation, path, settle, siblings } from "./conversation.js";
import { askForKey, askToDelete, showKeys } from "./dialogs.js";
import { byId } from "./dom.js";
import { drawers } from "./drawers.js";
import { exchange } from "./exchange.js";
import { contextUse, showContext } from "./figures.js";
import { listing } from "./listing.js";
import { modelPicker } from "./models.js";
import { clearNotice, notice } from "./notice.js";
import { panel } from "./panel.js";
import { recall, remember } from "./remembered.js";
import { shortcuts } from "./shortcuts.js";
import * as store from "./store.js";
import { themeSwitch } from "./theme.js";
import { thread } from "./thread.js";
import { offsetOf } from "./tokens.js";

const CURRENT = "ferrule-conversation";
const [UNAUTHORIZED, UNAVAILABLE] = [401, 503];
// A server that still loads its model is asked again.
const LOADING_MILLISECONDS = 2000;

let conversation = newConversation();

const sides = drawers();
const models = modelPicker(() => (conversation.model = models.chosen()));
const settings = panel(() => keepIfBegun());
const files = exchange({ current: () => conversation, show: adopt, refresh: refreshList });
const list = listing({ open, rename, exportOne: files.exportOne, remove });
const messages = thread({ edit, regenerate, goOn, choose: chooseVersion, branch });
const running = answers({ begin, progress, keep, done });
const writer = composer({ send, stop: () => running.stop(conversation.id) });

function show() {
  const now = running.of(conversation.id);
  messages.show(conversation, now?.answer.id);
  writer.setRunning(now !== null);
  meter();
  document.title = conversation.title ? `${conversation.title} · ferrule` : "ferrule";
}

function meter() {
  const shown = path(conversation).filter(({ role }) => role === "assistant");
  const model = shown.at(-1)?.model ?? models.chosen();
  showContext(byId("context"), contextUse(shown, models.all(), model));
}

async function refreshList() {
  const entries = await store.list().catch(() => []);
  const { id, title } = conversation;
  if (!entries.some((entry) => entry.id === id)) entries.unshift({ id, title });
  list.show(entries, id);
}

// --- Conversations

function adopt(next) {
  conversation = next;
  remember("tab", CURRENT, conversation.id);
  models.choose(conversation.model);
  settings.show(conversation);
  messages.toEnd();
  show();
}

/** A new conversation has the settings of the one before. */
async function create() {
  if (path(conversation).length > 0) {
    const { model, system, parameters } = conversation;
    adopt(newConversation({ model, system, parameters }));
    await refreshList();
  }
  sides.closeAll();
  writer.focus();
}

async function open(id) {
  if (id !== conversation.id) {
    const found = await find(id);
    if (!found) return refreshList();
    adopt(found);
    await refreshList();
  }
  if (sides.closeAll()) writer.focus();
}

// What is being written is shown as it is, not as it was kept last.
async function find(id) {
  const kept = running.of(id)?.conversation ?? (await store.load(id));
  return running.of(id) || !kept ? kept : settle(kept);
}

// What another tab has said is shown here too, and what it has deleted is gone.
async function follow(ids) {
  for (const id of ids) {
    const mine = running.of(id)?.conversation ?? (id === conversation.id ? conversation : null);
    if (!mine) continue;
    const kept = await store.load(id);
    if (kept) takeOver(mine, kept);
    else await leave(id);
  }
  await refreshList();
}

function takeOver(mine, kept) {
  const { title, model, system, parameters } = kept;
  const isSet = JSON.stringify([mine.system, mine.parameters]) === JSON.stringify([system, parameters]);
  merge(mine, kept);
  Object.assign(mine, { title, model, system, parameters });
  if (mine !== conversation) return;
  // A field that someone is writing in is let alone.
  if (!isSet) settings.show(conversation);
  show();
}

async function rename(id, title) {
  conversation.title = title;
  await keep(conversation);
  show();
}

async function remove(id, title) {
  if (!(await askToDelete(title))) return;
  await store.remove(id);
  await leave(id);
  await refreshList();
  writer.focus();
}

/** Ends what belongs to a conversation that was deleted, and shows another one in its place. */
async function leave(id) {
  running.stop(id);
  if (id !== conversation.id) return;
  const [next] = await store.list();
  adopt(next ? await find(next.id) : newConversation(conversation));
}

async function keep(kept) {
  try {
    await store.save(kept);
    await refreshList();
  } catch (error) {
    notice(`The conversation could not be kept in this browser: ${error.message}`);
  }
}

function keepIfBegun() {
  if (path(conversation).length > 0) keep(conversation);
}

// --- Messages and answers

function send(text) {
  if (models.chosen() === null) {
    notice("There is no model to ask yet.", start);
    return false;
  }
  const last = path(conversation).at(-1) ?? null;
  const message = append(conversation, last?.id ?? null, { role: "user", content: text });
  messages.toEnd();
  answer(message.id);
  return true;
}

function answer(parent, kept) {
  conversation.model = models.chosen();
  running.start(conversation, parent, conversation.model, kept);
}

function edit(node, text) {
  if (node.role === "user") {
    const message = append(conversation, node.parent, { role: "user", content: text });
    answer(message.id);
  } else {
    const { model, reasoning } = node;
    append(conversation, node.parent, {
      role: "assistant", content: text, tokens: [], model, reasoning, figures: null, finish: "stop", error: null,
    });
    keep(conversation);
  }
  show();
  writer.focus();
}

function regenerate(node) {
  if (node.error && node.content === "") discard(conversation, node);
  answer(node.parent);
}

function goOn(node) {
  answer(node.parent, { content: node.content, tokens: [...node.tokens], reasoning: node.reasoning });
}

/** Another version of an answer: as it was up to a token, then `text`, then what the model makes of it. */
function branch(node, index, text) {
  const { top } = node.tokens[index];
  const [, logprob] = top.find(([other]) => other === text);
  const content = node.content.slice(0, offsetOf(node.tokens, node.content, index)) + text;
  const tokens = [...node.tokens.slice(0, index), { text, logprob, top }];
  answer(node.parent, { content, tokens, reasoning: node.reasoning });
  writer.focus();
}

function chooseVersion(node, button) {
  choose(conversation, node);
  keep(conversation);
  show();
  messages.view(node)?.element.querySelector(`[data-act="${button}"]:not(:disabled), [data-act="copy"]`)?.focus();
}

function begin(begun) {
  keep(begun);
  if (begun === conversation) show();
}

function progress(changed, node) {
  if (changed !== conversation) return;
  messages.refresh(conversation, node, true);
  meter();
}

async function done(finished, node) {
  await keep(finished);
  if (finished === conversation) show();
  const given = node.error?.status === UNAUTHORIZED && (await askForKey(node.error.message));
  if (given && finished === conversation) regenerate(node);
}

// --- Keys

function lastOf(role) {
  return path(conversation).findLast((node) => node.role === role);
}

function version(step) {
  const node = path(conversation).findLast((shown) => siblings(conversation, shown).length > 1);
  const beside = node ? siblings(conversation, node) : [];
  const next = beside[beside.indexOf(node) + step];
  if (next) {
    choose(conversation, next);
    keep(conversation);
    show();
  }
}

function escape() {
  if (!sides.closeAll()) running.stop(conversation.id);
}

// --- Beginning

async function start() {
  try {
    await models.load();
    models.choose(conversation.model);
    meter();
    clearNotice();
  } catch (error) {
    notice(error.message, start);
    if (error.status === UNAVAILABLE) setTimeout(start, LOADING_MILLISECONDS);
  }
}

async function restore() {
  try {
    const [latest] = await store.list();
    const found = (await find(recall("tab", CURRENT) ?? "")) ?? (latest && (await find(latest.id)));
    adopt(found ?? conversation);
    await refreshList();
  } catch (error) {
    adopt(conversation);
    list.show([], conversation.id);
    notice(`This browser keeps no conversations: ${error.message}`);
  }
}

themeSwitch();
shortcuts({
  create,
  conversations: () => sides.toggle("sidebar"),
  settings: () => sides.toggle("settings"),
  regenerate: () => lastOf("assistant") && regenerate(lastOf("assistant")),
  edit: () => lastOf("user") && messages.view(lastOf("user")).edit(),
  keys: showKeys,
  version,
  escape,
});
byId("new").addEventListener("click", create);
byId("keys").addEventListener("click", showKeys);
const take = ({ currentTarget }) => writer.fill(currentTarget.textContent);
document.querySelectorAll("#examples button").forEach((example) => example.addEventListener("click", take));
store.onChange(follow);
addEventListener("pagehide", () => running.all().forEach(keep));
await restore();
await start();
writer.focus();
