/**
 * A client of Shardyard's messaging servers, for browsers. One file, no dependencies.
 *
 *     import { MessagingClient } from "/shardyard-messaging.js";
 *
 *     const client = new MessagingClient({ user: "alice" });
 *     client.on("message", (message) => console.log(message.from, message.text));
 *     await client.connect();
 *     await client.send("bob", "hello");
 *
 *     client.on("post", (post) => console.log(post.channel, post.from, post.text));
 *     await client.join("general");
 *     await client.post("general", "hello, everyone");
 *
 * A script that is no module loads it by `import("/shardyard-messaging.js").then(({ MessagingClient }) => ...)`.
 *
 * The client finds the user's server, stays connected, and resumes where it was, also after a reload of the page: what
 * it needs for that is kept in `sessionStorage`. Each message arrives once, in the order of its conversation or channel.
 * What the program sends is sent again until a server has acknowledged it, and is stored once. `docs/messaging-protocol.md`
 * describes the protocol.
 *
 * @typedef {{id: string, from: string, to: string, text: string, at: number}} Message
 *   `id`: digits; a later message has a greater number (see `compareIds`). `at`: when it was sent, in milliseconds
 *   since 1970.
 * @typedef {{id: string, from: string, to: string, kind: "delivered"|"seen", upto: string, at: number}} Mark
 *   `from` has got, or read, the messages of `to` up to the one with the id `upto`.
 * @typedef {{id: string, channel: string, from: string, text: string, at: number}} Post  A message in a channel. No two of
 *   a channel have the same id.
 * @typedef {{key: number, to?: string, channel?: string, text: string}} Unsent  A message to a user or a channel that no
 *   server has acknowledged yet.
 * @typedef {{with: string, last: Message, unread: number, seen: ?string, peer_delivered: ?string,
 *   peer_seen: ?string}} Chat  A conversation as the user sees it; the last three are ids of messages.
 */

const SUBPROTOCOL = "shardyard.messaging.1.json";
/** At the end of a server's address. */
const PATH = /\/v1\/messaging$/;

const PING_MS = 20_000;
/** A connection is lost if nothing is received for this long after a ping. */
const SILENCE_MS = 10_000;
const WELCOME_MS = 45_000;
const RESPONSE_MS = 5_000;
const CALL_MS = 30_000;
/** Waits before a new connection, doubled after each failure. */
const BACKOFF_MS = { first: 100, longest: 5_000 };
/** Waits before something is sent again that was refused for now. */
const RETRY_MS = { first: 50, longest: 2_000 };
/** The back-off starts anew after a connection that lasted this long. */
const STABLE_MS = 5_000;
/** How often in a row the client goes elsewhere without back-off. */
const HOPS = 2;
const MAX_AFTER_S = 60;
/** An access token that expires sooner is not used for a new connection. */
const EXPIRY_MS = 10_000;
/** Between two marks that messages were delivered. */
const DELIVERED_MS = 1_000;

/** Messages, marks and posts that a server takes from a client before it has acknowledged the first of them. */
const MAX_UNANSWERED = 32;
/** The log remembers so many numbers of a client; see `#sendMore`. */
const SEQUENCE_WINDOW = 64;
const MAX_UNSENT = 1_000;
const MAX_TEXT_BYTES = 16 * 1024;
const MAX_FRAME_BYTES = 64 * 1024;
const MAX_NAME_LENGTH = 128;
const MAX_WATCHED = 200;
/** Messages, posts and marks that are remembered, to drop those that come again. */
const KNOWN_IDS = 2_000;
/** Messages and posts that survive a reload of the page, because the history may not have them yet. */
const RECENT = { messages: 100, characters: 200_000 };
/** Other servers that are remembered, to ask them where the user's is when those that were given are gone. */
const MAX_SERVERS = 16;

const CODE = { tokenExpired: 4010, replaced: 4012, wrongToken: 4210 };
const STANDARD_ADVICE = { 1001: "elsewhere", 1002: "give up", 1003: "give up", 1007: "give up", 1009: "give up", 1012: "elsewhere" };

/** Why something was not done. `code` is that of the server's error, or one of the client's own. */
export class MessagingError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "MessagingError";
    this.code = code;
  }
}

/** The connection ended. `address`: where to connect next, if that is known; `after`: milliseconds to wait before. */
class Disconnected extends Error {
  constructor(message, { isElsewhere = false, address = null, after = 0 } = {}) {
    super(message);
    Object.assign(this, { isElsewhere, address, after });
  }
}

/** Negative if the first id is that of an older message. Ids are too large for JavaScript's numbers. */
export function compareIds(a, b) {
  return a.length - b.length || (a < b ? -1 : a > b ? 1 : 0);
}

/** What a client does when its connection was closed with this code: "reconnect", "elsewhere" or "give up". */
export function advice(code) {
  if (code >= 4100 && code < 4200) return "elsewhere";
  if (code >= 4200 && code < 4300) return "give up";
  return STANDARD_ADVICE[code] ?? "reconnect";
}

/**
 * One client of a user.
 *
 * Events, for `on`:
 * - `message` (Message): for the user, or sent by another client of the user.
 * - `post` (Post): in a channel that the user has joined, from another user or from another client of the user.
 * - `sent` ({key, message} or {key, post}): what this client has sent is durable. `key`: the one in `unsent`.
 * - `refused` ({key, to, text, error} or {key, channel, text, error}): it was refused, and will not be sent.
 * - `marked` (Mark): messages were delivered or seen.
 * - `typing` ({from}), `typingIn` ({channel, from}); `presence` ({user, online, since}): see `watch`.
 * - `membership` ({channel, joined}): the user has joined or left a channel, by this client or another one. What happens
 *   without a connection is not repeated: load `channels` after each new connection.
 * - `caughtup`: everything that was missed without a connection has been delivered.
 * - `gap` ({reason}): something that was missed can't be delivered any more: load the history, and the posts of channels.
 * - `state` ({state, reason}): `connecting`, `connected`, `waiting` (to connect again) or `closed`. It is closed by
 *   `close`, and if connecting again would not help; then `error` says why.
 */
export class MessagingClient {
  #listeners = new Map();
  #storage;
  #storageKey;
  #credentials;
  #servers;
  #learned = [];
  #at = 0;

  // What is stored; see `#save`
  #device;
  #number;
  #position = null;
  #last = null;
  #sent = null;
  #token = null;
  #expiresAt = 0;
  #outbox = [];
  #recent = [];

  #isTokenNew = false;
  #address = null;
  #socket = null;
  #disconnect = null;
  #isOpen = false;
  #count = 0;
  #received = 0;
  #known = new Set();
  #nextKey = 1;
  #questions = new Map();
  /** The last call to join or leave a channel, by channel. */
  #changes = new Map();
  #nextQuestion = 1;
  #watched = [];
  #delivered = new Map();
  #isMarking = false;
  #marksDelivered;
  #connected = null;
  /** An object as long as the client is not closed; another one after each `connect`. */
  #run = null;
  #wake = null;
  #wakeUp = () => this.#lookAgain();

  /**
   * @param {object} options
   * @param {string} options.user
   * @param {string[]} [options.servers] URLs of some messaging servers; by default the one that this page is from. While
   *   the client is connected, it learns those of the others.
   * @param {string} [options.secret] The shared secret, if the servers have one.
   * @param {string|function(): Promise<string>} [options.token] Instead of it: a token that an application signed with
   *   the secret, or a function that gets a new one.
   * @param {?Storage} [options.storage] Where the state is kept over reloads: that of the window by default; null: only
   *   in memory.
   * @param {boolean} [options.markDelivered] Tell senders that their messages have arrived. True by default.
   */
  constructor({ user, servers, secret, token, storage = windowStorage(), markDelivered = true }) {
    this.user = checkedUser(user);
    this.state = "closed";
    this.error = null;
    this.#servers = (servers ?? [globalThis.location.origin]).map((url) => url.replace(/\/+$/, ""));
    this.#credentials = { secret, token };
    this.#storage = storage;
    this.#storageKey = `shardyard.messaging ${user}`;
    this.#marksDelivered = markDelivered;
    this.#restore();
  }

  /** Call `listener` with the detail of each event of this name. Returns a function that ends that. */
  on(name, listener) {
    if (!this.#listeners.has(name)) this.#listeners.set(name, new Set());
    this.#listeners.get(name).add(listener);
    return () => this.#listeners.get(name).delete(listener);
  }

  /**
   * Connect, and stay connected until `close`. Resolves with the first connection; rejected if there will be none, such
   * as for a wrong secret. Also to go on after another window has replaced this client.
   */
  connect() {
    if (this.#run) return this.#connected;
    this.error = null;
    this.#number = Math.max(this.#number, firstNumber());
    globalThis.addEventListener?.("online", this.#wakeUp);
    globalThis.document?.addEventListener("visibilitychange", this.#wakeUp);
    this.#connected = new Promise((resolve, reject) => {
      const stop = this.on("state", ({ state }) => {
        if (state !== "connected" && state !== "closed") return;
        stop();
        state === "connected" ? resolve() : reject(this.error ?? new MessagingError("closed", "the client was closed"));
      });
    });
    this.#connected.catch(() => {});
    this.#run = {};
    this.#stayConnected(this.#run);
    return this.#connected;
  }

  /** Close the connection. What is not sent yet stays stored, for the next client of this user in this window. */
  close() {
    this.#end(null);
  }

  /** Close the connection and delete what is stored, also what was not sent yet. */
  signOut() {
    this.close();
    this.#storage?.removeItem(this.#storageKey);
    this.#storage = null;
  }

  /** Messages and posts that were not acknowledged yet, also those from before a reload of the page.
   * @returns {Unsent[]} */
  get unsent() {
    return this.#outbox.filter(({ type }) => type !== "mark").map(({ key, ...call }) => ({ key, ...addressed(call) }));
  }

  /** The last messages that were received and sent, also before a reload. The history may not have them yet.
   * @returns {Message[]} */
  get recent() {
    return this.#recent.filter(({ channel }) => channel === undefined);
  }

  /** The same of channels. @returns {Post[]} */
  get recentPosts() {
    return this.#recent.filter(({ channel }) => channel !== undefined);
  }

  // Sending

  /**
   * Send a message. What is sent to one user is stored in the order of the calls. Without a connection it waits for
   * one, without a time limit. Rejected with `MessagingError` if a server refuses it.
   * @returns {Promise<Message>} When it is durable. Its property `key` is the one in `unsent` and in events.
   */
  send(to, text) {
    return this.#enqueueText({ type: "send", to: checkedUser(to), text: wellFormed(text), lane: `send ${to}` });
  }

  /**
   * Send a message to all members of a channel, of which the user has to be one. Otherwise as `send`.
   * @returns {Promise<Post>}
   */
  post(channel, text) {
    return this.#enqueueText({ type: "post", channel: checkedChannel(channel), text: wellFormed(text), lane: `post ${channel}` });
  }

  /** Tell a user that the messages up to this one were read. */
  markSeen(sender, upto) {
    if (compareIds(this.#delivered.get(sender) ?? upto, upto) <= 0) this.#delivered.delete(sender);
    return this.#mark("seen", sender, upto);
  }

  /** Show another user that this one is typing. Without a connection it is dropped. */
  typing(to) {
    this.#write({ type: "typing", to: checkedUser(to) });
  }

  /** Get the presence of these users as events instead of those of the last call: now, and after every change. */
  watch(users) {
    this.#watched = [...new Set(users)].map(checkedUser).slice(0, MAX_WATCHED);
    this.#write({ type: "watch", users: this.#watched });
  }

  /** Show the members of a channel that this user is typing. Without a connection it is dropped. */
  typingIn(channel) {
    this.#write({ type: "typing-in", channel: checkedChannel(channel) });
  }

  // Channels

  /** Join a channel; it exists as soon as somebody joins. Resolves when that is durable: what is posted from then on is
   * delivered. Joining twice changes nothing. */
  join(channel) {
    return this.#changeMembership("join", checkedChannel(channel));
  }

  /** Leave a channel. Resolves when that is durable. */
  leave(channel) {
    return this.#changeMembership("leave", checkedChannel(channel));
  }

  /** What was posted to a channel, newest first. `before`: only those older than the post with this id.
   * @returns {Promise<{posts: Post[], more: boolean}>} */
  async posts(channel, { before = null, limit = 50 } = {}) {
    const { posts, more } = await this.#ask({ type: "posts", channel: checkedChannel(channel), before, limit });
    return { posts, more };
  }

  /** The names of the channels that the user has joined, in their order. `after`: only those after this name.
   * @returns {Promise<{channels: string[], more: boolean}>} */
  async channels({ after = null, limit = 50 } = {}) {
    const { channels, more } = await this.#ask({ type: "channels", after, limit });
    return { channels, more };
  }

  /** One change of a channel at a time: if it is refused for now, the next one does not overtake it. */
  #changeMembership(type, channel) {
    const before = this.#changes.get(channel) ?? Promise.resolve();
    const change = before.catch(() => {}).then(() => this.#ask({ type, channel }));
    const forget = () => this.#changes.get(channel) === change && this.#changes.delete(channel);
    this.#changes.set(channel, change);
    change.then(forget, forget);
    return change.then(() => {});
  }

  // Asking

  /** Messages of a conversation, newest first. `before`: only those older than the message with this id.
   * @returns {Promise<{messages: Message[], more: boolean}>} */
  history(peer, { before = null, limit = 50 } = {}) {
    return this.#ask({ type: "history", with: checkedUser(peer), before, limit });
  }

  /** The user's conversations, the one with the newest message first. `before`: only those whose last message is older.
   * @returns {Promise<{chats: Chat[], more: boolean}>} */
  chats({ before = null, limit = 50 } = {}) {
    return this.#ask({ type: "chats", before, limit });
  }

  // The connection

  async #stayConnected(run) {
    let failures = 0;
    while (this.#run === run) {
      const started = Date.now();
      let delay;
      try {
        this.#setState("connecting");
        const address = await this.#findServer();
        if (this.#run !== run) return;
        await this.#serve(address);
      } catch (error) {
        if (this.#run !== run) return;
        if (!(error instanceof Disconnected)) return this.#end(error);
        failures = Date.now() - started >= STABLE_MS ? 1 : failures + 1;
        this.#address = error.address;
        delay = error.isElsewhere && failures <= HOPS ? error.after : Math.max(error.after, backoff(BACKOFF_MS, failures));
        this.#setState("waiting", error.message);
      }
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, delay);
        this.#wake = () => (clearTimeout(timer), resolve());
      });
      this.#wake = null;
    }
  }

  /** Where to connect, with a token that is valid for a while. */
  async #findServer() {
    if (!this.#token || this.#expiresAt < Date.now() + EXPIRY_MS) {
      const { secret, token } = this.#credentials;
      const signed = typeof token === "function" ? await token() : token;
      const session = await this.#request("POST", "/v1/session", { user: this.user, secret, token: signed });
      if (session.user !== this.user) throw new MessagingError("wrong_token", `the token is one of user ${session.user}`);
      this.#token = session.token;
      this.#expiresAt = session.expires_at;
      this.#isTokenNew = true;
      this.#address = session.address;
      this.#save();
    }
    return this.#address ?? (await this.#request("GET", `/v1/where/${encodeURIComponent(this.user)}`)).address;
  }

  /** Ask one of the servers, and the next one if it can't be reached. `MessagingError` if it refuses. */
  async #request(method, path, body) {
    const urls = [...new Set([...this.#servers, ...this.#learned])];
    let failure = null;
    for (let i = 0; i < urls.length; i++, this.#at++) {
      const url = urls[this.#at % urls.length];
      try {
        const response = await fetch(url + path, {
          method,
          signal: AbortSignal.timeout(RESPONSE_MS),
          ...(body && { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
        });
        const answer = await response.json();
        if (response.ok) return answer;
        const { code, message } = answer.error;
        if (response.status < 500 && response.status !== 429) throw new MessagingError(code, message);
        failure = message;
      } catch (error) {
        if (error instanceof MessagingError) throw error;
        failure = `${url} can't be reached`;
      }
    }
    throw new Disconnected(failure);
  }

  /** Serve one connection until it ends, which rejects with the reason. */
  #serve(address) {
    return new Promise((_, reject) => {
      let socket;
      try {
        socket = new WebSocket(address, SUBPROTOCOL);
      } catch (error) {
        reject(new Disconnected(`${address}: ${error.message}`));
        return;
      }
      const timers = [setTimeout(() => end(new Disconnected(`${address} does not answer`)), WELCOME_MS)];
      const end = (error) => {
        timers.forEach(clearTimeout);
        socket.onopen = socket.onmessage = socket.onclose = null;
        socket.close();
        this.#socket = null;
        this.#isOpen = false;
        reject(error);
      };
      this.#disconnect = end;
      this.#socket = socket;
      this.#count = this.#received = 0;
      let isReached = false;
      socket.onopen = () => {
        isReached = true;
        this.#address = address;
        const { token, device, position, last, sent } = this.#resumePoint();
        socket.send(JSON.stringify({ type: "hello", token, device, position, last, sent }));
      };
      socket.onmessage = ({ data }) => {
        this.#received++;
        try {
          for (const frame of [JSON.parse(data)].flat()) {
            if (this.#socket !== socket) return;
            if (frame.type === "welcome") {
              timers.splice(0).forEach(clearTimeout);
              timers.push(setInterval(() => this.#ping(), PING_MS));
            }
            this.#handle(frame);
          }
        } catch (error) {
          end(error instanceof Disconnected ? error : new Disconnected(`a frame is wrong: ${error.message}`));
        }
        this.#save();
      };
      // An address that can't be reached is not tried again: the directory will know a better one.
      socket.onclose = ({ code, reason }) => end(this.#explain(code, reason, isReached ? address : null));
    });
  }

  #resumePoint() {
    return { token: this.#token, device: this.#device, position: this.#position, last: this.#last, sent: this.#sent };
  }

  #explain(code, reason, address) {
    const message = address === null ? "the server can't be reached" : `the connection was closed with code ${code}${reason && ` (${reason})`}`;
    if (code === CODE.replaced) return new MessagingError("replaced", "this client is in use in another window");
    if (code === CODE.tokenExpired || (code === CODE.wrongToken && !this.#isTokenNew)) {
      this.#token = null;
      return new Disconnected("the access token has expired", { isElsewhere: true });
    }
    if (advice(code) === "give up") return new MessagingError(code === CODE.wrongToken ? "wrong_token" : "protocol", message);
    return new Disconnected(message, { address: advice(code) === "elsewhere" ? null : address });
  }

  #welcomed(welcome) {
    this.#isTokenNew = false;
    this.#learn(welcome.servers);
    this.#position = welcome.position;
    this.#sent ??= welcome.sent;
    this.#isOpen = true;
    if (this.#watched.length) this.#write({ type: "watch", users: this.#watched });
    const inFlight = this.#outbox.filter(({ number }) => number !== undefined);
    inFlight.sort((a, b) => a.number - b.number).forEach((call) => this.#writeCall(call));
    this.#questions.forEach(({ frame }) => this.#write(frame));
    this.#sendMore();
    this.#setState("connected");
    if (welcome.resume === "lost") this.#emit("gap", { reason: "the position is not known any more" });
  }

  #ping() {
    const before = this.#received;
    const end = this.#disconnect;
    this.#write({ type: "ping" });
    setTimeout(() => {
      if (this.#disconnect === end && this.#isOpen && this.#received === before) end(new Disconnected("the server has gone silent"));
    }, SILENCE_MS);
  }

  /** The network, or the window, is back: do not wait any longer. */
  #lookAgain() {
    if (globalThis.document?.visibilityState === "hidden") return;
    this.#wake?.();
    if (this.#isOpen) this.#ping();
  }

  /** The addresses of servers, in `welcome`, and in `pong` if they have changed. Those who gave addresses with TLS only
   * do not send their secret without. */
  #learn(addresses = []) {
    if (!addresses.length) return;
    const urls = addresses.slice(0, MAX_SERVERS).map((address) => address.replace(/^ws/, "http").replace(PATH, ""));
    const isSecure = (url) => url.startsWith("https:");
    this.#learned = this.#servers.every(isSecure) ? urls.filter(isSecure) : urls;
  }

  #end(error) {
    if (!this.#run) return;
    this.#run = null;
    this.error = error;
    globalThis.removeEventListener?.("online", this.#wakeUp);
    globalThis.document?.removeEventListener("visibilitychange", this.#wakeUp);
    if (this.#socket) this.#disconnect(new Disconnected("closed"));
    this.#wake?.();
    this.#save();
    this.#setState("closed", error?.message ?? "");
  }

  #setState(state, reason = "") {
    this.state = state;
    this.#emit("state", { state, reason });
  }

  #emit(name, detail) {
    for (const listener of this.#listeners.get(name) ?? []) {
      try {
        listener(detail);
      } catch (error) {
        console.error(error); // an error of the program is none of the connection
      }
    }
  }

  #write(frame) {
    if (this.#isOpen) this.#socket.send(JSON.stringify(frame));
  }

  // Receiving

  #handle(frame) {
    switch (frame.type) {
      case "welcome":
        return this.#welcomed(frame);
      case "deliver":
        return this.#deliver(frame);
      case "sent":
        return this.#acknowledged(frame);
      case "refused":
        return this.#refused(frame);
      case "page":
      case "chat-list":
      case "posts-page":
      case "channel-list":
      case "done":
        return this.#answered(frame.number, (question) => question.resolve(frame));
      case "caught-up":
        this.#position = frame.position;
        return this.#emit("caughtup", {});
      case "pong":
        this.#position = frame.position ?? this.#position;
        return this.#learn(frame.servers);
      case "gap":
      case "typing":
      case "presence":
      case "membership":
        return this.#emit(frame.type, frame);
      case "typing-in":
        return this.#emit("typingIn", frame);
      case "elsewhere":
        throw new Disconnected("another server serves this user", {
          isElsewhere: true,
          address: frame.address,
          after: Math.min(Math.max(frame.after, 0), MAX_AFTER_S) * 1000,
        });
      default: // of a newer server
    }
  }

  #deliver({ seq, epoch, entries }) {
    if (seq !== this.#count) throw new Disconnected(`${seq} messages were sent and ${this.#count} received`);
    this.#count += entries.length;
    for (const { offset, type, ...entry } of entries) {
      if (offset !== undefined) {
        if (epoch === this.#position.epoch && offset < this.#position.offset) continue;
        this.#position = { partition: this.#position.partition, epoch, offset: offset + 1 };
        if (type !== "posted") this.#last = entry.id;
      }
      if (entry.from === this.user && type !== "posted") this.#noteSent(entry.id);
      if (this.#known.has(knownAs(entry))) continue;
      this.#remember(knownAs(entry));
      if (type === "posted") {
        this.#keep(entry);
        this.#emit("post", entry);
      } else if (type === "marked") {
        this.#emit("marked", entry);
      } else if (type === "message") {
        this.#keep(entry);
        if (entry.from !== this.user) this.#noteDelivered(entry);
        this.#emit("message", entry);
      }
    }
  }

  #noteSent(id) {
    if (!this.#sent || compareIds(id, this.#sent) > 0) this.#sent = id;
  }

  #remember(key) {
    this.#known.add(key);
    if (this.#known.size > KNOWN_IDS) this.#known.delete(this.#known.values().next().value);
  }

  #keep(message) {
    this.#recent.push(message);
    let characters = this.#recent.reduce((sum, { text }) => sum + text.length, 0);
    while (this.#recent.length > RECENT.messages || characters > RECENT.characters) {
      characters -= this.#recent.shift().text.length;
    }
  }

  #noteDelivered({ from, id }) {
    if (!this.#marksDelivered) return;
    this.#delivered.set(from, id);
    if (!this.#isMarking) {
      this.#isMarking = true;
      setTimeout(() => this.#flushDelivered());
    }
  }

  #flushDelivered() {
    this.#isMarking = this.#delivered.size > 0;
    this.#delivered.forEach((upto, sender) => this.#mark("delivered", sender, upto).catch(() => {}));
    this.#delivered.clear();
    if (this.#isMarking) setTimeout(() => this.#flushDelivered(), DELIVERED_MS);
  }

  // Messages, posts and marks on their way

  #mark(kind, to, upto) {
    const lane = `${kind} ${to}`;
    const waiting = this.#outbox.find((call) => call.lane === lane && call.number === undefined);
    if (!waiting) return this.#enqueue({ type: "mark", to: checkedUser(to), kind, upto, lane });
    if (compareIds(upto, waiting.upto) > 0) waiting.upto = upto;
    return waiting.done;
  }

  #enqueueText(call) {
    const bytes = encodedSize(call.text);
    if (bytes > MAX_TEXT_BYTES) throw new MessagingError("too_large", `a text has at most ${MAX_TEXT_BYTES} bytes, this one ${bytes}`);
    if (encodedSize(JSON.stringify(call)) + 100 > MAX_FRAME_BYTES) throw new MessagingError("too_large", "the text has too many special characters");
    return this.#enqueue(call);
  }

  #enqueue(call) {
    if (this.#outbox.length >= MAX_UNSENT) throw new MessagingError("overloaded", `${MAX_UNSENT} messages wait to be sent`);
    call.key = this.#nextKey++;
    this.#promise(call);
    this.#outbox.push(call);
    this.#sendMore();
    this.#save();
    return call.done;
  }

  #promise(call) {
    call.done = new Promise((resolve, reject) => Object.assign(call, { resolve, reject }));
    call.done.key = call.key;
    call.done.catch(() => {}); // there is an event for it, too
  }

  /**
   * Send what may be sent. Of one lane only one is in flight: if it is refused for now, no later one overtakes it. A
   * number is not used while one so far behind it is in flight that the log could not recognise it any more.
   */
  #sendMore() {
    if (!this.#isOpen) return;
    const inFlight = this.#outbox.filter(({ number }) => number !== undefined);
    const lanes = new Set(inFlight.map(({ lane }) => lane));
    const oldest = Math.min(...inFlight.map(({ number }) => number), this.#number);
    const free = Math.min(MAX_UNANSWERED - inFlight.length, oldest + SEQUENCE_WINDOW - this.#number);
    const next = [];
    for (const call of this.#outbox) {
      if (next.length >= free) break;
      if (call.number !== undefined || lanes.has(call.lane)) continue;
      lanes.add(call.lane);
      call.number = this.#number++;
      next.push(call);
    }
    if (next.length) this.#save(); // a number must not be used twice
    next.forEach((call) => this.#writeCall(call));
  }

  #writeCall({ type, number, to, kind, upto, ...call }) {
    this.#write({ type, number, ...(type === "mark" ? { to, kind, upto } : addressed({ to, ...call })) });
  }

  #finish(number) {
    const index = this.#outbox.findIndex((call) => call.number === number);
    return index < 0 ? null : this.#outbox.splice(index, 1)[0];
  }

  #acknowledged({ number, id, at }) {
    const call = this.#finish(number);
    if (call?.type !== "post") this.#noteSent(id);
    if (!call) return;
    if (call.type !== "mark") {
      const message = { id, from: this.user, ...addressed(call), at };
      this.#remember(knownAs(message));
      this.#keep(message);
      this.#emit("sent", { key: call.key, [call.type === "post" ? "post" : "message"]: message });
      call.resolve(message);
    } else {
      call.resolve({ id, at });
    }
    this.#sendMore();
  }

  #refused({ number, code, message, retry }) {
    const error = new MessagingError(code, message);
    const call = this.#outbox.find((each) => each.number === number);
    if (call && retry) {
      call.attempt = (call.attempt ?? 0) + 1;
      setTimeout(() => this.#outbox.includes(call) && this.#writeCall(call), backoff(RETRY_MS, call.attempt));
    } else if (call) {
      this.#finish(number);
      call.reject(error);
      if (call.type !== "mark") this.#emit("refused", { key: call.key, ...addressed(call), error });
      this.#sendMore();
    } else if (retry) {
      const question = this.#questions.get(number);
      if (!question) return;
      question.refusal = error;
      setTimeout(() => this.#questions.has(number) && this.#write(question.frame), backoff(RETRY_MS, ++question.attempt));
    } else {
      this.#answered(number, (question) => question.reject(error));
    }
  }

  // Questions

  #ask(asked) {
    const number = this.#nextQuestion++; // apart from those of messages, which start at a time
    const frame = { ...asked, number };
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        const { refusal } = this.#questions.get(number);
        this.#questions.delete(number);
        reject(refusal ?? new MessagingError("no_answer", `no answer came in ${CALL_MS / 1000} s`));
      }, CALL_MS);
      this.#questions.set(number, { frame, resolve, reject, timer, attempt: 0, refusal: null });
      this.#write(frame);
    });
  }

  #answered(number, settle) {
    const question = this.#questions.get(number);
    if (!question) return;
    clearTimeout(question.timer);
    this.#questions.delete(number);
    settle(question);
  }

  // What survives a reload of the page

  #save() {
    if (!this.#storage) return;
    const outbox = this.#outbox.map(({ done, resolve, reject, attempt, ...call }) => call);
    const stored = { ...this.#resumePoint(), expiresAt: this.#expiresAt, number: this.#number, outbox, recent: this.#recent };
    for (const recent of [this.#recent, []]) {
      try {
        this.#storage.setItem(this.#storageKey, JSON.stringify({ ...stored, recent }));
        return;
      } catch {
        continue; // it does not fit: rather without what the history will have
      }
    }
  }

  #restore() {
    let stored = {};
    try {
      stored = JSON.parse(this.#storage?.getItem(this.#storageKey) ?? "{}");
    } catch {
      // begin anew
    }
    this.#device = stored.device ?? newDevice();
    this.#number = stored.number ?? 0;
    this.#position = stored.position ?? null;
    this.#last = stored.last ?? null;
    this.#sent = stored.sent ?? null;
    this.#token = stored.token ?? null;
    this.#expiresAt = stored.expiresAt ?? 0;
    this.#outbox = stored.outbox ?? [];
    this.#recent = stored.recent ?? [];
    this.#outbox.forEach((call) => this.#promise(call));
    this.#nextKey = Math.max(0, ...this.#outbox.map(({ key }) => key)) + 1;
    this.#recent.forEach((entry) => this.#remember(knownAs(entry)));
  }
}

function windowStorage() {
  try {
    return globalThis.sessionStorage ?? null;
  } catch {
    return null; // the browser forbids it
  }
}

/** No two clients of a user may have the same name. */
function newDevice() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Numbers ascend over the life of a device. Nobody sends a message in every microsecond, so the time is great enough
 * where the last number is not known. */
function firstNumber() {
  return Date.now() * 1000;
}

/** Half of it is random, so that not all clients come back at the same time. */
function backoff({ first, longest }, attempt) {
  return Math.min(first * 2 ** (attempt - 1), longest) * (0.5 + Math.random() / 2);
}

function checkedUser(user) {
  return checkedName("user", user);
}

function checkedChannel(channel) {
  return checkedName("channel", channel);
}

function checkedName(what, name) {
  if (typeof name !== "string" || !name || [...name].length > MAX_NAME_LENGTH || wellFormed(name) !== name || name.includes("\0")) {
    throw new MessagingError("invalid_value", `the name of a ${what} has 1 to ${MAX_NAME_LENGTH} characters, and none of them is NUL`);
  }
  return name;
}

/** By what a message, a post or a mark is recognised if it comes again: the ids of a channel's posts are its own. */
function knownAs({ id, channel }) {
  return channel === undefined ? id : `${id} ${channel}`;
}

/** The text of a call, and the user or channel that it is for. */
function addressed({ to, channel, text }) {
  return channel === undefined ? { to, text } : { channel, text };
}

/** Without halves of characters, which can't be encoded. */
function wellFormed(text) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new TextEncoder().encode(text));
}

function encodedSize(text) {
  return new TextEncoder().encode(text).length;
}
