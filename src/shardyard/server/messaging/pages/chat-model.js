/** What the chat page knows: conversations and channels, who is online and who types. Nothing here is on the screen. */

import { compareIds } from "/shardyard-messaging.js";

export const model = {
  /** @type {?import("/shardyard-messaging.js").MessagingClient} */
  client: null,
  /** Conversations and channels by their keys: see `chatWith` and `channelNamed`. @type {Map<string, Chat>} */
  chats: new Map(),
  /** The key of the one that is open. @type {?string} */
  openKey: null,
  /** By user: {online, since}. */
  presence: new Map(),
  /** By key: a timer that ends it for each user who types there. */
  typing: new Map(),
  /** The last post of each channel that was on the screen in this window. No server stores that. */
  seenPosts: new Map(),
};

/**
 * @typedef {{key: string, peer: ?string, channel: ?string, isJoined: boolean, messages: Array, unsent: Array,
 *   unread: number, seen: string, peerDelivered: string, peerSeen: string, hasMore: boolean, oldestLoaded: ?string,
 *   newestLoaded: string, isCurrent: boolean, isLoading: boolean}} Chat  With a user, or in a channel. `messages`: by id.
 *   The history is loaded from `oldestLoaded` to `newestLoaded`; `hasMore`: there are older messages; `isCurrent`: newer
 *   ones have been delivered.
 */

/** @returns {Chat} */
function chatAs(key, peer, channel) {
  if (!model.chats.has(key)) {
    model.chats.set(key, {
      key, peer, channel, isJoined: false, messages: [], unsent: [], unread: 0, seen: "0", peerDelivered: "0", peerSeen: "0",
      hasMore: true, oldestLoaded: null, newestLoaded: "0", isCurrent: false, isLoading: false,
    });
  }
  return model.chats.get(key);
}

export function chatWith(peer) {
  return chatAs(`@${peer}`, peer, null);
}

export function channelNamed(channel) {
  const chat = chatAs(`#${channel}`, null, channel);
  chat.seen = newer(chat.seen, model.seenPosts.get(channel) ?? "0");
  return chat;
}

/** The chat that a message or a post belongs to. */
export function chatOf({ channel, from, to }) {
  return channel === undefined ? chatWith(from === model.client.user ? to : from) : channelNamed(channel);
}

/** Whether the user's name is shown on the other side. What is not acknowledged yet has no `from`. */
export function isMine(message, chat) {
  return chat.channel === null ? message.from !== chat.peer : (message.from ?? model.client.user) === model.client.user;
}

/** The chat that a message belongs to if it is new, and else null. */
export function addKnown(message) {
  const chat = chatOf(message);
  let at = chat.messages.length;
  while (at > 0 && compareIds(chat.messages[at - 1].id, message.id) > 0) at--;
  if (chat.messages[at - 1]?.id === message.id) return null;
  chat.messages.splice(at, 0, message);
  return chat;
}

/** The last message of a chat, which may wait to be sent. */
export function lastOf(chat) {
  return chat.unsent.at(-1) ?? chat.messages.at(-1);
}

export function noteSeen(chat, upto) {
  chat.seen = newer(chat.seen, upto);
  chat.unread = chat.messages.filter((each) => !isMine(each, chat) && compareIds(each.id, chat.seen) > 0).length;
}

export function newer(a, b) {
  return compareIds(a, b) < 0 ? b : a;
}

/** What is shown about who types; empty if nobody does. */
export function typingText({ key, channel }) {
  const users = [...(model.typing.get(key)?.keys() ?? [])];
  if (!users.length || channel === null) return users.length ? "typing …" : "";
  if (users.length > 2) return "several people are typing …";
  return `${users.join(" and ")} ${users.length === 1 ? "is" : "are"} typing …`;
}
