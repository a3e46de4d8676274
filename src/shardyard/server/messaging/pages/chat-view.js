/** Shows what `chat-model.js` knows. Texts and names are only ever set as text, and never as HTML. */

import { compareIds } from "/shardyard-messaging.js";
import { dayElement, element, longTime, paint, paintAvatar, place, setText, shortTime, ticks } from "/chat-elements.js";
import { isMine, lastOf, model, typingText } from "/chat-model.js";

/** Closer to the end than this, new messages are scrolled into view. */
const NEAR_END_PX = 80;

export const byId = (id) => document.getElementById(id);

let isRenderDue = false;

/** Show what has changed, once for all changes of this turn. */
export function render() {
  if (isRenderDue) return;
  isRenderDue = true;
  queueMicrotask(() => {
    isRenderDue = false;
    if (!model.client) return;
    const focused = document.activeElement?.dataset?.chat;
    renderChats();
    renderChannels();
    if (focused) chatButton(focused)?.focus(); // it may have been moved
    renderConversation();
  });
}

function renderChats() {
  const shown = [...model.chats.values()].filter((chat) => chat.peer !== null && (lastOf(chat) || chat.key === model.openKey));
  shown.sort((a, b) => (lastOf(b)?.at ?? Infinity) - (lastOf(a)?.at ?? Infinity));
  renderButtons(byId("chats"), shown, renderChat, (button) => {
    button.append(element("span", "avatar"), element("span", "who"));
    const [first, second] = [element("span", "line"), element("span", "line")];
    button.lastChild.append(first, second);
    first.append(element("strong", "name"), element("time", ""));
    second.append(element("span", "preview"), element("span", "unread"));
  });
  byId("no-chats").hidden = shown.length > 0;
  const unread = shown.reduce((sum, chat) => sum + chat.unread, 0);
  document.title = unread ? `(${unread}) Shardyard chat` : "Shardyard chat";
}

function renderChannels() {
  const shown = [...model.chats.values()].filter(({ isJoined }) => isJoined);
  shown.sort((a, b) => (a.channel < b.channel ? -1 : 1));
  renderButtons(byId("channels"), shown, renderChannel, (button) => {
    button.append(element("span", "hash"), element("span", "name"), element("span", "preview"), element("span", "dot"));
    button.firstChild.textContent = "#";
  });
  byId("no-channels").hidden = shown.length > 0;
}

/** A list of buttons, each of which opens a chat. */
function renderButtons(list, shown, update, fill) {
  place(list, shown.map(({ key }) => key), () => {
    const item = document.createElement("li");
    const button = item.appendChild(element("button", "chat"));
    button.type = "button";
    fill(button);
    return item;
  });
  shown.forEach((chat, index) => {
    const button = list.children[index].firstChild;
    button.dataset.chat = chat.key;
    button.setAttribute("aria-current", String(chat.key === model.openKey));
    update(button, chat);
  });
}

function renderChat(button, chat) {
  const part = (name) => button.querySelector(name);
  const last = lastOf(chat);
  const isOnline = model.presence.get(chat.peer)?.online > 0;
  const types = typingText(chat);
  part(".avatar").classList.toggle("is-online", isOnline);
  paintAvatar(part(".avatar"), chat.peer);
  part(".name").textContent = chat.peer;
  part("time").textContent = last ? shortTime(last.at) : "";
  part(".preview").classList.toggle("is-typing", Boolean(types));
  part(".preview").textContent = types || (last ? (isMine(last, chat) ? "You: " : "") + last.text.slice(0, 200) : "");
  part(".unread").hidden = !chat.unread;
  part(".unread").textContent = chat.unread > 999 ? "999+" : String(chat.unread);
  const unread = chat.unread ? `, ${chat.unread} unread` : "";
  button.setAttribute("aria-label", `${chat.peer}${isOnline ? ", online" : ""}${unread}. ${part(".preview").textContent}`);
}

function renderChannel(button, chat) {
  const part = (name) => button.querySelector(name);
  const types = typingText(chat);
  part(".name").textContent = chat.channel;
  part(".preview").classList.toggle("is-typing", Boolean(types));
  part(".preview").textContent = types;
  part(".dot").hidden = !chat.unread;
  button.classList.toggle("has-unread", chat.unread > 0);
  button.setAttribute("aria-label", `channel ${chat.channel}${chat.unread ? ", new posts" : ""}. ${types}`);
}

function renderConversation() {
  const chat = model.chats.get(model.openKey);
  byId("app").classList.toggle("has-open-chat", Boolean(chat));
  byId("open-chat").hidden = !chat;
  byId("nothing-open").hidden = Boolean(chat);
  if (!chat) return;
  const { peer, channel } = chat;
  const { online, since } = model.presence.get(peer) ?? {};
  const types = typingText(chat);
  byId("peer").textContent = peer ?? channel;
  paintAvatar(byId("peer-avatar"), peer ?? channel, channel === null ? undefined : "#");
  byId("peer-avatar").classList.toggle("is-channel", channel !== null);
  byId("peer-avatar").classList.toggle("is-online", online > 0);
  byId("peer-state").classList.toggle("is-typing", Boolean(types));
  const state = channel !== null ? "channel" : online > 0 ? "online" : since ? `offline since ${longTime(since)}` : online === 0 ? "offline" : "";
  setText(byId("peer-state"), types || state);
  byId("leave").hidden = channel === null;
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
    const from = message.from ?? model.client.user;
    const isFirst = day !== before?.day || from !== before.from;
    items.push({ key: message.id ?? `unsent ${message.key}`, message, isOwn: isMine(message, chat), isFirst });
    before = { day, from };
  }
  place(list, items.map(({ key }) => key), (index) => (items[index].day ? dayElement(items[index].day) : messageElement(items[index], chat)));
  items.forEach((item, index) => item.message && updateMessage(list.children[index], item, chat));

  const hasNew = list.lastElementChild?.dataset.key !== lastBefore && lastBefore !== undefined;
  if (isNearEnd) list.scrollTop = list.scrollHeight;
  else if (!hasNew) list.scrollTop = list.scrollHeight - fromEnd;
  else byId("newest").hidden = false;
}

function messageElement({ message, isOwn }, { channel }) {
  const shown = element("article", `message${isOwn ? " is-mine" : ""}`);
  if (channel !== null && !isOwn) {
    const sender = shown.appendChild(element("strong", "sender"));
    sender.textContent = message.from || `#${channel}`; // what a program posts may have no sender
    paint(sender, sender.textContent);
  }
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

function updateMessage(shown, { message, isOwn, isFirst }, chat) {
  shown.classList.toggle("is-first", isFirst);
  if (!isOwn) return;
  const isUpTo = (mark) => message.id && compareIds(message.id, mark) <= 0;
  const state = message.error ? "refused" : !message.id ? "waiting" : isUpTo(chat.peerSeen) ? "seen" : isUpTo(chat.peerDelivered) ? "delivered" : "sent";
  if (shown.dataset.state === state) return;
  shown.dataset.state = state;
  shown.classList.toggle("is-refused", state === "refused");
  const meta = shown.querySelector(".meta");
  while (meta.children.length > 1) meta.lastChild.remove();
  meta.append(message.error ? `not sent: ${message.error}` : ticks(state));
}

export function scrollToEnd() {
  queueMicrotask(() => {
    byId("messages").scrollTop = byId("messages").scrollHeight;
    byId("newest").hidden = true;
  });
}

export function showError(id, message) {
  byId(id).textContent = message;
  byId(id).hidden = !message;
}

export function chatButtons() {
  return [...byId("lists").querySelectorAll("button.chat")];
}

export function chatButton(key) {
  return chatButtons().find((button) => button.dataset.chat === key) ?? null;
}

byId("newest").addEventListener("click", scrollToEnd);
byId("messages").addEventListener("scroll", () => {
  const list = byId("messages");
  if (list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX) byId("newest").hidden = true;
});
