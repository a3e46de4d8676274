/** The chat page: what is on the screen. Texts and names are only ever set as text, and never as HTML. */

import { MessagingClient, compareIds } from "/shardyard-messaging.js";

const STORAGE_KEY = "shardyard.chat";
const PAGE_SIZE = 50;
/** How long another user is shown as typing after the last notice, and how often this one sends a notice. */
const TYPING_SHOWN_MS = 5_000;
const TYPING_SENT_MS = 2_500;
/** Closer to the end than this, new messages are scrolled into view. */
const NEAR_END_PX = 80;
const LOAD_OLDER_PX = 200;
/** The history may be moments behind. What was sent just before this page was opened is looked for again after so long. */
const LOAD_AGAIN_MS = [1_000, 3_000, 10_000];
const CONNECTION = { connecting: "connecting …", connected: "connected", waiting: "no connection, trying again …", closed: "not connected" };

const byId = (id) => document.getElementById(id);

/** @type {?MessagingClient} */
let client = null;
/** By the other user's name; see `chatWith`. */
let chats = new Map();
let openPeer = null;
let presence = new Map();
/** The timers that end it, by user. */
let typing = new Map();
let typingSentAt = 0;
let isListLoaded = false;

// Signing in and out

async function signIn(user, secret) {
  const signing = new MessagingClient({ user, secret });
  chats = new Map();
  presence = new Map();
  openPeer = null;
  isListLoaded = false;
  signing.on("state", ({ state, reason }) => signing === client && showConnection(state, reason));
  signing.on("message", (message) => receive(message));
  signing.on("sent", ({ key, message }) => acknowledged(key, message));
  signing.on("refused", ({ key, to, error }) => refused(key, to, error));
  signing.on("marked", applyMark);
  signing.on("typing", ({ from }) => showTyping(from));
  signing.on("presence", ({ user: who, online, since }) => {
    presence.set(who, { online, since });
    render();
  });
  signing.on("gap", () => loadAgain());
  client = signing;
  signing.recent.forEach(addKnown);
  signing.unsent.forEach(({ key, to, text }) => chatWith(to).unsent.push({ key, text, at: Date.now() }));
  await signing.connect();
  for (const delay of LOAD_AGAIN_MS) setTimeout(() => signing === client && loadAgain(), delay);
}

function showSignIn(message = "") {
  byId("app").hidden = true;
  byId("sign-in").hidden = false;
  showError("sign-in-error", message);
  byId("name").focus();
}

function showApp() {
  byId("sign-in").hidden = true;
  byId("app").hidden = false;
  byId("closed").hidden = true;
  byId("me").textContent = client.user;
  paintAvatar(byId("me-avatar"), client.user);
  showConnection(client.state);
  render();
}

byId("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const user = byId("name").value.trim();
  const button = event.target.querySelector("button");
  button.disabled = true;
  try {
    await signIn(user, byId("secret").value || undefined);
  } catch (error) {
    client?.signOut();
    client = null;
    showSignIn(error.code === "wrong_token" ? "The secret is wrong, or the server needs one." : error.message);
    return;
  } finally {
    button.disabled = false;
  }
  byId("secret").value = "";
  remember();
  showApp();
});

byId("sign-out").addEventListener("click", () => {
  client.signOut();
  client = null;
  sessionStorage.removeItem(STORAGE_KEY);
  document.title = "Shardyard chat";
  showSignIn();
});

/** So that a reload of the page shows the same. */
function remember() {
  sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ user: client.user, openPeer }));
}

function showConnection(state, reason = "") {
  const shown = byId("connection");
  shown.textContent = CONNECTION[state];
  shown.dataset.state = state;
  shown.title = reason;
  if (state === "waiting") showError("sign-in-error", `Trying again: ${reason}.`);
  if (state === "connected") load();
  if (state !== "closed" || !client?.error) return;
  if (client.error.code === "replaced") {
    byId("closed-reason").textContent = "This chat is open in another window.";
    byId("closed").hidden = false;
    byId("reconnect").focus();
  } else {
    client.signOut();
    sessionStorage.removeItem(STORAGE_KEY);
    showSignIn(`You were signed out: ${reason}.`);
  }
}

byId("reconnect").addEventListener("click", () => {
  byId("closed").hidden = true;
  client.connect();
});

// What is known

/**
 * @returns {{peer: string, messages: Array, unsent: Array, unread: number, seen: string, peerDelivered: string,
 *   peerSeen: string, hasMore: boolean, oldestLoaded: ?string, newestLoaded: string, isCurrent: boolean,
 *   isLoading: boolean}} `messages`: by id. The history is loaded from `oldestLoaded` to `newestLoaded`; `hasMore`: there
 *   are older messages; `isCurrent`: newer ones have been delivered.
 */
function chatWith(peer) {
  if (!chats.has(peer)) {
    chats.set(peer, {
      peer, messages: [], unsent: [], unread: 0, seen: "0", peerDelivered: "0", peerSeen: "0",
      hasMore: true, oldestLoaded: null, newestLoaded: "0", isCurrent: false, isLoading: false,
    });
  }
  return chats.get(peer);
}

/** The chat that a message belongs to if it is new, and else null. */
function addKnown(message) {
  const chat = chatWith(message.from === client.user ? message.to : message.from);
  let at = chat.messages.length;
  while (at > 0 && compareIds(chat.messages[at - 1].id, message.id) > 0) at--;
  if (chat.messages[at - 1]?.id === message.id) return null;
  chat.messages.splice(at, 0, message);
  return chat;
}

function receive(message) {
  const chat = addKnown(message);
  if (!chat) return;
  if (message.from !== client.user) {
    chat.unread++;
    stopTyping(message.from);
  }
  watchChats();
  render();
  markSeen();
}

function acknowledged(key, message) {
  const chat = chatWith(message.to);
  chat.unsent = chat.unsent.filter((each) => each.key !== key);
  addKnown(message);
  render();
}

function refused(key, to, error) {
  const unsent = chatWith(to).unsent.find((each) => each.key === key);
  if (unsent) unsent.error = error.message;
  render();
}

function applyMark({ from, to, kind, upto }) {
  const isMine = from === client.user;
  const chat = chatWith(isMine ? to : from);
  if (isMine) {
    if (kind === "seen") noteSeen(chat, upto);
  } else if (kind === "seen") {
    chat.peerSeen = newer(chat.peerSeen, upto);
  } else {
    chat.peerDelivered = newer(chat.peerDelivered, upto);
  }
  render();
}

function noteSeen(chat, upto) {
  chat.seen = newer(chat.seen, upto);
  chat.unread = chat.messages.filter(({ id, from }) => from === chat.peer && compareIds(id, chat.seen) > 0).length;
}

function newer(a, b) {
  return compareIds(a, b) < 0 ? b : a;
}

/** Mark what is on the screen. */
function markSeen() {
  const chat = chats.get(openPeer);
  if (!chat || document.visibilityState !== "visible") return;
  const last = chat.messages.findLast(({ from }) => from === chat.peer);
  if (!last || compareIds(last.id, chat.seen) <= 0) return;
  noteSeen(chat, last.id);
  if (chat.peer !== client.user) client.markSeen(chat.peer, last.id).catch(() => {});
  render();
}

document.addEventListener("visibilitychange", () => client && markSeen());

function watchChats() {
  const names = [...chats.keys()].filter((name) => name !== client.user);
  if (names.every((name) => watchChats.last?.has(name)) && watchChats.client === client) return;
  watchChats.last = new Set(names);
  watchChats.client = client;
  client.watch(names);
}

// The history

/** Load what was not loaded yet. */
async function load() {
  await Promise.all([isListLoaded || loadChats(), openPeer !== null && loadNewest(chatWith(openPeer))]);
}

/** Something may be missing that will not be delivered any more. */
async function loadAgain() {
  isListLoaded = false;
  for (const chat of chats.values()) chat.isCurrent = false;
  await load();
}

async function loadChats() {
  const asked = client;
  try {
    const found = await asked.chats({ limit: 200 });
    if (asked !== client) return;
    for (const { with: peer, last, unread, seen, peer_delivered: delivered, peer_seen: peerSeen } of found.chats) {
      const chat = chatWith(peer);
      chat.seen = newer(chat.seen, seen ?? "0");
      chat.peerDelivered = newer(chat.peerDelivered, delivered ?? "0");
      chat.peerSeen = newer(chat.peerSeen, peerSeen ?? "0");
      const since = chat.messages.filter(({ id, from }) => from === peer && compareIds(id, newer(last.id, chat.seen)) > 0);
      chat.unread = (compareIds(chat.seen, seen ?? "0") > 0 ? 0 : unread) + since.length;
      addKnown(last);
    }
    isListLoaded = true;
  } catch (error) {
    console.warn("the list of chats was not loaded:", error.message);
  }
  watchChats();
  render();
  markSeen();
}

/** Load the newest page, and those before it up to what was loaded earlier. */
async function loadNewest(chat) {
  if (chat.isCurrent) return;
  await loading(chat, async () => {
    const upto = chat.newestLoaded;
    let page = await loadPage(chat, null);
    while (upto !== "0" && page.more && compareIds(page.messages.at(-1).id, upto) > 0) {
      page = await loadPage(chat, page.messages.at(-1).id);
    }
    if (upto === "0") Object.assign(chat, { oldestLoaded: page.messages.at(-1)?.id ?? null, hasMore: page.more });
    chat.isCurrent = true;
  });
}

async function loadOlder(chat) {
  await loading(chat, async () => {
    const page = await loadPage(chat, chat.oldestLoaded);
    Object.assign(chat, { oldestLoaded: page.messages.at(-1)?.id ?? chat.oldestLoaded, hasMore: page.more });
  });
}

async function loadPage(chat, before) {
  const page = await client.history(chat.peer, { before, limit: PAGE_SIZE });
  page.messages.forEach(addKnown);
  if (page.messages.length) chat.newestLoaded = newer(chat.newestLoaded, page.messages[0].id);
  return page;
}

/** One at a time for each chat. */
async function loading(chat, work) {
  if (chat.isLoading) return;
  chat.isLoading = true;
  try {
    await work();
  } catch (error) {
    console.warn("the history was not loaded:", error.message);
  } finally {
    chat.isLoading = false;
  }
  render();
  markSeen();
}

function loadOlderIfNeeded() {
  const chat = chats.get(openPeer);
  if (chat?.oldestLoaded && chat.hasMore && byId("messages").scrollTop < LOAD_OLDER_PX) loadOlder(chat);
}

// Choosing a chat

function open(peer) {
  openPeer = peer;
  const chat = chatWith(peer);
  remember();
  watchChats();
  byId("messages").replaceChildren();
  showError("send-error", "");
  render();
  scrollToEnd();
  loadNewest(chat);
  markSeen();
  queueMicrotask(() => byId("text").focus()); // once it is shown
}

function leave() {
  const button = chatButton(openPeer);
  openPeer = null;
  remember();
  render();
  queueMicrotask(() => (button ?? byId("new-peer")).focus());
}

byId("back").addEventListener("click", leave);
byId("open-chat").addEventListener("keydown", (event) => event.key === "Escape" && leave());

byId("new-chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const peer = byId("new-peer").value.trim();
  byId("new-peer").value = "";
  if (peer) open(peer);
});

byId("chats").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const buttons = [...byId("chats").querySelectorAll("button")];
  buttons[buttons.indexOf(document.activeElement) + step]?.focus();
});

// Writing

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("text");
  if (!field.value.trim()) return;
  const chat = chatWith(openPeer);
  try {
    const { key } = client.send(openPeer, field.value);
    chat.unsent.push({ key, text: field.value, at: Date.now() });
  } catch (error) {
    showError("send-error", `Not sent: ${error.message}.`);
    return;
  }
  showError("send-error", "");
  field.value = "";
  typingSentAt = 0;
  render();
  scrollToEnd();
});

byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});

byId("text").addEventListener("input", () => {
  if (!byId("text").value || Date.now() - typingSentAt < TYPING_SENT_MS) return;
  typingSentAt = Date.now();
  client.typing(openPeer);
});

function showTyping(user) {
  clearTimeout(typing.get(user));
  typing.set(user, setTimeout(() => stopTyping(user), TYPING_SHOWN_MS));
  render();
}

function stopTyping(user) {
  clearTimeout(typing.get(user));
  if (typing.delete(user)) render();
}

// Showing it

let isRenderDue = false;

/** Show what has changed, once for all changes of this turn. */
function render() {
  if (isRenderDue) return;
  isRenderDue = true;
  queueMicrotask(() => {
    isRenderDue = false;
    if (!client) return;
    renderChats();
    renderConversation();
  });
}

function lastOf(chat) {
  return chat.unsent.at(-1) ?? chat.messages.at(-1);
}

function renderChats() {
  const shown = [...chats.values()].filter((chat) => lastOf(chat) || chat.peer === openPeer);
  shown.sort((a, b) => (lastOf(b)?.at ?? Infinity) - (lastOf(a)?.at ?? Infinity));
  const list = byId("chats");
  const focused = document.activeElement?.dataset?.peer;
  place(list, shown.map(({ peer }) => peer), () => {
    const item = document.createElement("li");
    const button = item.appendChild(document.createElement("button"));
    button.type = "button";
    button.className = "chat";
    button.append(element("span", "avatar"), element("span", "who"));
    const [first, second] = [element("span", "line"), element("span", "line")];
    button.lastChild.append(first, second);
    first.append(element("strong", "name"), element("time", ""));
    second.append(element("span", "preview"), element("span", "unread"));
    button.addEventListener("click", () => open(button.dataset.peer));
    return item;
  });
  shown.forEach((chat, index) => renderChat(list.children[index].firstChild, chat));
  if (focused) chatButton(focused)?.focus();
  byId("no-chats").hidden = shown.length > 0;
  const unread = shown.reduce((sum, chat) => sum + chat.unread, 0);
  document.title = unread ? `(${unread}) Shardyard chat` : "Shardyard chat";
}

function renderChat(button, chat) {
  const part = (name) => button.querySelector(name);
  const last = lastOf(chat);
  const isOnline = presence.get(chat.peer)?.online > 0;
  const isTyping = typing.has(chat.peer);
  const isMine = last && last.from !== chat.peer;
  button.dataset.peer = chat.peer;
  button.setAttribute("aria-current", String(chat.peer === openPeer));
  part(".avatar").classList.toggle("is-online", isOnline);
  paintAvatar(part(".avatar"), chat.peer);
  part(".name").textContent = chat.peer;
  part("time").textContent = last ? shortTime(last.at) : "";
  part(".preview").classList.toggle("is-typing", isTyping);
  part(".preview").textContent = isTyping ? "typing …" : last ? (isMine ? "You: " : "") + last.text.slice(0, 200) : "";
  part(".unread").hidden = !chat.unread;
  part(".unread").textContent = chat.unread > 999 ? "999+" : String(chat.unread);
  const unread = chat.unread ? `, ${chat.unread} unread` : "";
  button.setAttribute("aria-label", `${chat.peer}${isOnline ? ", online" : ""}${unread}. ${part(".preview").textContent}`);
}

function renderConversation() {
  const chat = chats.get(openPeer);
  byId("app").classList.toggle("has-open-chat", Boolean(chat));
  byId("open-chat").hidden = !chat;
  byId("nothing-open").hidden = Boolean(chat);
  if (!chat) return;
  const { online, since } = presence.get(openPeer) ?? {};
  const isTyping = typing.has(openPeer);
  byId("peer").textContent = openPeer;
  paintAvatar(byId("peer-avatar"), openPeer);
  byId("peer-avatar").classList.toggle("is-online", online > 0);
  byId("peer-state").classList.toggle("is-typing", isTyping);
  setText(byId("peer-state"), isTyping ? "typing …" : online > 0 ? "online" : since ? `offline since ${longTime(since)}` : online === 0 ? "offline" : "");
  renderMessages(chat);
}

function renderMessages(chat) {
  const list = byId("messages");
  const isNearEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
  const fromEnd = list.scrollHeight - list.scrollTop;
  const lastBefore = list.lastElementChild?.dataset.key;

  const items = [];
  let before = null;
  // Between older messages that are known by chance and those that are loaded, some may be missing.
  const first = chat.hasMore && chat.oldestLoaded !== null ? chat.oldestLoaded : "0";
  for (const message of [...chat.messages.filter(({ id }) => compareIds(id, first) >= 0), ...chat.unsent]) {
    const day = new Date(message.at).toDateString();
    if (day !== before?.day) items.push({ key: `day ${day}`, day: message.at });
    const isMine = message.from !== chat.peer;
    items.push({ key: message.id ?? `unsent ${message.key}`, message, isMine, isFirst: day !== before?.day || isMine !== before.isMine });
    before = { day, isMine };
  }
  place(list, items.map(({ key }) => key), (index) => (items[index].day ? dayElement(items[index].day) : messageElement(items[index])));
  items.forEach((item, index) => item.message && updateMessage(list.children[index], item, chat));

  const hasNew = list.lastElementChild?.dataset.key !== lastBefore && lastBefore !== undefined;
  if (isNearEnd) list.scrollTop = list.scrollHeight;
  else if (!hasNew) list.scrollTop = list.scrollHeight - fromEnd;
  else byId("newest").hidden = false;
}

function dayElement(at) {
  const shown = element("div", "day");
  shown.textContent = new Date(at).toLocaleDateString(undefined, { weekday: "long", day: "numeric", month: "long" });
  return shown;
}

function messageElement({ message, isMine }) {
  const shown = element("article", `message${isMine ? " is-mine" : ""}`);
  const text = element("p", "text");
  text.textContent = message.text;
  const meta = element("footer", "meta");
  const time = element("time", "");
  time.dateTime = new Date(message.at).toISOString();
  time.title = new Date(message.at).toLocaleString();
  time.textContent = new Date(message.at).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  meta.append(time);
  shown.append(text, meta);
  return shown;
}

function updateMessage(shown, { message, isMine, isFirst }, chat) {
  shown.classList.toggle("is-first", isFirst);
  if (!isMine) return;
  const isUpTo = (mark) => message.id && compareIds(message.id, mark) <= 0;
  const state = message.error ? "refused" : !message.id ? "waiting" : isUpTo(chat.peerSeen) ? "seen" : isUpTo(chat.peerDelivered) ? "delivered" : "sent";
  if (shown.dataset.state === state) return;
  shown.dataset.state = state;
  shown.classList.toggle("is-refused", state === "refused");
  const meta = shown.querySelector(".meta");
  while (meta.children.length > 1) meta.lastChild.remove();
  meta.append(message.error ? `not sent: ${message.error}` : ticks(state));
}

const TICKS = {
  waiting: ["M8.5 1.5a4 4 0 1 0 .01 0M8.5 3.5v2.2l1.5 1"],
  sent: ["M5 6l3 3 6-7"],
  delivered: ["M1 6l3 3 6-7", "M7.5 8.5l.5.5 6-7"],
};

function ticks(state) {
  const shown = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  shown.setAttribute("class", `ticks is-${state}`);
  shown.setAttribute("viewBox", "0 0 15 11");
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", state);
  for (const line of TICKS[state] ?? TICKS.delivered) {
    shown.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path")).setAttribute("d", line);
  }
  return shown;
}

/** Give `parent` a child for each key, in this order. Children that are there already are kept, and moved if needed. */
function place(parent, keys, make) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, index) => {
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = make(index);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  old.forEach((child) => child.remove());
}

function scrollToEnd() {
  queueMicrotask(() => {
    byId("messages").scrollTop = byId("messages").scrollHeight;
    byId("newest").hidden = true;
  });
}

byId("newest").addEventListener("click", scrollToEnd);
byId("messages").addEventListener("scroll", () => {
  const list = byId("messages");
  if (list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX) byId("newest").hidden = true;
  loadOlderIfNeeded();
});

function element(name, className) {
  const made = document.createElement(name);
  made.className = className;
  return made;
}

/** A screen reader announces a status whenever it is set. */
function setText(shown, text) {
  if (shown.textContent !== text) shown.textContent = text;
}

function showError(id, message) {
  byId(id).textContent = message;
  byId(id).hidden = !message;
}

function chatButton(peer) {
  return [...byId("chats").querySelectorAll("button")].find((button) => button.dataset.peer === peer) ?? null;
}

function paintAvatar(avatar, name) {
  avatar.textContent = [...name][0] ?? "";
  const hue = [...name].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) % 360, 7);
  avatar.style.setProperty("--hue", hue);
}

function shortTime(at) {
  const date = new Date(at);
  return date.toDateString() === new Date().toDateString()
    ? date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

function longTime(at) {
  const date = new Date(at);
  const time = date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${shortTime(at)}, ${time}`;
}

// After a reload of the page

const remembered = JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "null");
if (remembered === null) {
  showSignIn();
} else {
  signIn(remembered.user).catch(() => {}); // it is shown with the state of the connection
  showApp();
  if (remembered.openPeer !== null) open(remembered.openPeer);
}
