/** The chat page: what its user does, and what happens to it. `chat-model.js` has what it knows, `chat-view.js` shows it. */

import { MessagingClient, compareIds } from "/shardyard-messaging.js";
import { addKnown, channelNamed, chatOf, chatWith, isMine, model, newer, noteSeen } from "/chat-model.js";
import { paintAvatar } from "/chat-elements.js";
import { byId, chatButton, chatButtons, render, scrollToEnd, showError } from "/chat-view.js";

const STORAGE_KEY = "shardyard.chat";
const PAGE_SIZE = 50;
/** How long another user is shown as typing after the last notice, and how often this one sends a notice. */
const TYPING_SHOWN_MS = 5_000;
const TYPING_SENT_MS = 2_500;
const LOAD_OLDER_PX = 200;
/** The history may be moments behind. What was sent just before this page was opened is looked for again after so long. */
const LOAD_AGAIN_MS = [1_000, 3_000, 10_000];
/** Channels that are listed, and those that are looked at for new posts after some may have been missed. */
const MAX_CHANNELS = 1_000;
const MAX_CHECKED = 50;
const NO_CHANNELS = "No channels yet. Type a name above to join one.";
const CONNECTION = { connecting: "connecting …", connected: "connected", waiting: "no connection, trying again …", closed: "not connected" };

let typingSentAt = 0;
let isListLoaded = false;
let areChannelsLoaded = false;
let arePostsChecked = false;
/** How often the user has joined or left a channel: a list that was asked for before that is out of date. */
let membershipChanges = 0;

// Signing in and out

async function signIn(user, secret) {
  const signing = new MessagingClient({ user, secret });
  model.chats = new Map();
  model.presence = new Map();
  model.openKey = null;
  isListLoaded = areChannelsLoaded = arePostsChecked = false;
  signing.on("state", ({ state, reason }) => signing === model.client && showConnection(state, reason));
  signing.on("message", (message) => receive(message));
  signing.on("post", (post) => receive(post));
  signing.on("sent", ({ key, message, post }) => acknowledged(key, message ?? post));
  signing.on("refused", refused);
  signing.on("marked", applyMark);
  signing.on("typing", ({ from }) => showTyping(chatWith(from), from));
  signing.on("typingIn", ({ channel, from }) => showTyping(channelNamed(channel), from));
  signing.on("membership", ({ channel, joined }) => (joined ? addChannel(channel) : removeChannel(channel)));
  signing.on("presence", ({ user: who, online, since }) => {
    model.presence.set(who, { online, since });
    render();
  });
  signing.on("gap", () => {
    arePostsChecked = false;
    loadAgain();
  });
  model.client = signing;
  [...signing.recent, ...signing.recentPosts].forEach(addKnown);
  signing.unsent.forEach(({ key, to, channel, text }) => {
    const chat = channel === undefined ? chatWith(to) : channelNamed(channel);
    chat.unsent.push({ key, text, at: Date.now() });
  });
  await signing.connect();
  for (const delay of LOAD_AGAIN_MS) setTimeout(() => signing === model.client && loadAgain(), delay);
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
  byId("me").textContent = model.client.user;
  paintAvatar(byId("me-avatar"), model.client.user);
  showConnection(model.client.state);
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
    model.client?.signOut();
    model.client = null;
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
  model.client.signOut();
  model.client = null;
  model.seenPosts = new Map();
  sessionStorage.removeItem(STORAGE_KEY);
  document.title = "Shardyard chat";
  showSignIn();
});

/** So that a reload of the page shows the same. */
function remember() {
  sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ user: model.client.user, openKey: model.openKey, seenPosts: [...model.seenPosts] }));
}

function showConnection(state, reason = "") {
  const shown = byId("connection");
  shown.textContent = CONNECTION[state];
  shown.dataset.state = state;
  shown.title = reason;
  if (state === "waiting") showError("sign-in-error", `Trying again: ${reason}.`);
  if (state === "connected") {
    areChannelsLoaded = false; // it is not repeated what was joined and left without a connection
    load();
  }
  if (state !== "closed" || !model.client?.error) return;
  if (model.client.error.code === "replaced") {
    byId("closed-reason").textContent = "This chat is open in another window.";
    byId("closed").hidden = false;
    byId("reconnect").focus();
  } else {
    model.client.signOut();
    sessionStorage.removeItem(STORAGE_KEY);
    showSignIn(`You were signed out: ${reason}.`);
  }
}

byId("reconnect").addEventListener("click", () => {
  byId("closed").hidden = true;
  model.client.connect();
});

// What is known

function receive(message) {
  const chat = addKnown(message);
  if (!chat) return;
  if (message.from !== model.client.user) {
    chat.unread++;
    stopTyping(chat, message.from);
  }
  watchChats();
  render();
  markSeen();
}

function acknowledged(key, message) {
  const chat = chatOf(message);
  chat.unsent = chat.unsent.filter((each) => each.key !== key);
  addKnown(message);
  render();
}

function refused({ key, to, channel, error }) {
  const chat = channel === undefined ? chatWith(to) : channelNamed(channel);
  const unsent = chat.unsent.find((each) => each.key === key);
  if (unsent) unsent.error = error.message;
  render();
}

function applyMark({ from, to, kind, upto }) {
  const isOwn = from === model.client.user;
  const chat = chatWith(isOwn ? to : from);
  if (isOwn) {
    if (kind === "seen") noteSeen(chat, upto);
  } else if (kind === "seen") {
    chat.peerSeen = newer(chat.peerSeen, upto);
  } else {
    chat.peerDelivered = newer(chat.peerDelivered, upto);
  }
  render();
}

/** Mark what is on the screen. */
function markSeen() {
  const chat = model.chats.get(model.openKey);
  if (!chat || document.visibilityState !== "visible") return;
  const last = chat.messages.findLast((each) => !isMine(each, chat));
  if (!last || compareIds(last.id, chat.seen) <= 0) return;
  noteSeen(chat, last.id);
  if (chat.channel !== null) {
    model.seenPosts.set(chat.channel, last.id);
    remember();
  } else if (chat.peer !== model.client.user) {
    model.client.markSeen(chat.peer, last.id).catch(() => {});
  }
  render();
}

document.addEventListener("visibilitychange", () => model.client && markSeen());

function watchChats() {
  const names = [...model.chats.values()].map(({ peer }) => peer).filter((name) => name !== null && name !== model.client.user);
  if (names.every((name) => watchChats.last?.has(name)) && watchChats.client === model.client) return;
  watchChats.last = new Set(names);
  watchChats.client = model.client;
  model.client.watch(names);
}

// The history

/** Load what was not loaded yet. */
async function load() {
  const chat = model.chats.get(model.openKey);
  await Promise.all([isListLoaded || loadChats(), areChannelsLoaded || loadChannels(), chat && loadNewest(chat)]);
}

/** Something may be missing that will not be delivered any more. */
async function loadAgain() {
  isListLoaded = areChannelsLoaded = false;
  for (const chat of model.chats.values()) chat.isCurrent = false;
  await load();
}

async function loadChats() {
  const asked = model.client;
  try {
    const found = await asked.chats({ limit: 200 });
    if (asked !== model.client) return;
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
  const page = await askPage(chat, { before, limit: PAGE_SIZE });
  page.messages.forEach(addKnown);
  if (page.messages.length) chat.newestLoaded = newer(chat.newestLoaded, page.messages[0].id);
  return page;
}

async function askPage({ peer, channel }, asked) {
  if (channel === null) return model.client.history(peer, asked);
  const { posts, more } = await model.client.posts(channel, asked);
  return { messages: posts, more };
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
  const chat = model.chats.get(model.openKey);
  if (chat?.oldestLoaded && chat.hasMore && byId("messages").scrollTop < LOAD_OLDER_PX) loadOlder(chat);
}

// Channels

async function loadChannels() {
  const asked = model.client;
  const changes = membershipChanges;
  try {
    const names = [];
    let page;
    do {
      page = await asked.channels({ after: names.at(-1) ?? null, limit: 200 });
      names.push(...page.channels);
    } while (page.more && page.channels.length && names.length < MAX_CHANNELS);
    if (asked !== model.client) return;
    if (changes !== membershipChanges) return loadChannels();
    areChannelsLoaded = true;
    const joined = new Set(names);
    [...model.chats.values()].filter(({ channel }) => channel !== null && !joined.has(channel)).forEach(forgetChannel);
    names.forEach((name) => (channelNamed(name).isJoined = true));
    byId("no-channels").textContent = NO_CHANNELS;
  } catch (error) {
    if (asked === model.client) byId("no-channels").textContent = `Channels can't be shown: ${error.message}.`;
  }
  render();
  if (areChannelsLoaded && !arePostsChecked) checkPosts(asked);
}

/** Find out which channels have posts that were not on the screen. */
async function checkPosts(asked) {
  arePostsChecked = true;
  for (const chat of [...model.chats.values()].filter(({ isJoined }) => isJoined).slice(0, MAX_CHECKED)) {
    try {
      const { posts } = await asked.posts(chat.channel, { limit: 1 });
      if (asked !== model.client) return;
      if (!posts.length) continue;
      addKnown(posts[0]);
      // Without a known post, this window begins with what comes from now on.
      if (chat.seen === "0" && !chat.unread) model.seenPosts.set(chat.channel, posts[0].id);
      noteSeen(chat, model.seenPosts.get(chat.channel) ?? "0");
    } catch (error) {
      console.warn(`the last post of ${chat.channel} was not loaded:`, error.message);
    }
  }
  remember();
  render();
  markSeen();
}

function addChannel(channel) {
  membershipChanges++;
  channelNamed(channel).isJoined = true;
  render();
}

function removeChannel(channel) {
  membershipChanges++;
  forgetChannel(channelNamed(channel));
  render();
}

function forgetChannel(chat) {
  if (chat.key === model.openKey) closeChat();
  model.chats.delete(chat.key);
  model.seenPosts.delete(chat.channel);
  remember();
}

byId("join-channel").addEventListener("submit", async (event) => {
  event.preventDefault();
  const channel = byId("new-channel").value.trim().replace(/^#/, "");
  if (!channel) return;
  const asked = model.client;
  showError("channels-error", "");
  try {
    await asked.join(channel);
  } catch (error) {
    if (asked === model.client) showError("channels-error", `Not joined: ${error.message}.`);
    return;
  }
  if (asked !== model.client) return;
  byId("new-channel").value = "";
  addChannel(channel);
  open(channelNamed(channel));
});

byId("leave").addEventListener("click", async () => {
  const asked = model.client;
  const { channel } = model.chats.get(model.openKey);
  try {
    await asked.leave(channel);
    if (asked === model.client) removeChannel(channel);
  } catch (error) {
    if (asked === model.client) showError("send-error", `Not left: ${error.message}.`);
  }
});

byId("messages").addEventListener("scroll", loadOlderIfNeeded);

// Choosing a chat

function open(chat) {
  model.openKey = chat.key;
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

function closeChat() {
  const key = model.openKey;
  model.openKey = null;
  remember();
  render();
  queueMicrotask(() => (chatButton(key) ?? byId("new-peer")).focus());
}

byId("back").addEventListener("click", closeChat);
byId("open-chat").addEventListener("keydown", (event) => event.key === "Escape" && closeChat());

byId("new-chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const peer = byId("new-peer").value.trim();
  byId("new-peer").value = "";
  if (peer) open(chatWith(peer));
});

byId("lists").addEventListener("click", (event) => {
  const button = event.target.closest("button.chat");
  if (button) open(model.chats.get(button.dataset.chat));
});

byId("lists").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || event.target.tagName !== "BUTTON") return;
  event.preventDefault();
  const buttons = chatButtons();
  const at = buttons.indexOf(document.activeElement);
  if (at >= 0) buttons[at + step]?.focus();
});

// Writing

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("text");
  if (!field.value.trim()) return;
  const chat = model.chats.get(model.openKey);
  try {
    const { key } = chat.channel === null ? model.client.send(chat.peer, field.value) : model.client.post(chat.channel, field.value);
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
  const { peer, channel } = model.chats.get(model.openKey);
  channel === null ? model.client.typing(peer) : model.client.typingIn(channel);
});

function showTyping({ key }, user) {
  if (user === model.client.user) return;
  if (!model.typing.has(key)) model.typing.set(key, new Map());
  clearTimeout(model.typing.get(key).get(user));
  model.typing.get(key).set(user, setTimeout(() => stopTyping({ key }, user), TYPING_SHOWN_MS));
  render();
}

function stopTyping({ key }, user) {
  const users = model.typing.get(key);
  clearTimeout(users?.get(user));
  if (!users?.delete(user)) return;
  if (!users.size) model.typing.delete(key);
  render();
}

// After a reload of the page

const remembered = JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "null");
if (remembered === null) {
  showSignIn();
} else {
  model.seenPosts = new Map(remembered.seenPosts ?? []);
  signIn(remembered.user).catch(() => {}); // it is shown with the state of the connection
  showApp();
  const key = remembered.openKey ?? "";
  if (key) open(key.startsWith("@") ? chatWith(key.slice(1)) : channelNamed(key.slice(1)));
}
