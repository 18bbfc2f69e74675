// One document that the daemon keeps up to date: a snapshot, then merge patches (RFC 7396), as server-sent events.
// EventSource cannot send a token, and a token has no place in a URL; so the stream is read with fetch.

const SILENCE_MS = 6000; // a message comes each second
const LONGEST_PAUSE_MS = 8000;

export class Unauthorized extends Error {}

// Calls the daemon with the token. Throws Unauthorized, or an Error with what the daemon said.
export async function call(path, token, options = {}) {
  const headers = token ? {Authorization: `Bearer ${token}`} : {};
  const answer = await fetch(path, {...options, headers, cache: "no-store", referrerPolicy: "no-referrer"});
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Error(problem.detail || `the daemon answered ${answer.status}`);
  }
  return answer;
}

export function merged(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const base = target !== null && typeof target === "object" && !Array.isArray(target) ? target : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete base[key];
    else base[key] = merged(base[key], value);
  }
  return base;
}

// Reads the stream until it ends; tells `onDocument` after each message.
async function follow(token, signal, onDocument) {
  const quiet = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => quiet.abort(new Error("the daemon says nothing any more")), SILENCE_MS);
  };
  heard();
  try {
    const answer = await call("v1/events", token, {signal: AbortSignal.any([signal, quiet.signal])});
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "", shown = {};
    for (;;) {
      const {value, done} = await reader.read();
      if (done) throw new Error("the daemon has ended the stream");
      heard();
      buffer += value;
      const messages = buffer.split("\n\n");
      buffer = messages.pop();
      for (const message of messages) {
        const event = /^event: (.*)$/m.exec(message)[1];
        const data = JSON.parse(/^data: (.*)$/m.exec(message)[1]);
        shown = event === "snapshot" ? data : merged(shown, data);
        onDocument(shown, event === "snapshot");
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

// Keeps listening, also over a restart of the daemon. A page that nobody sees does not listen.
// `onState(text, live)` says how it goes. Returns only by throwing Unauthorized.
export async function listen(token, onDocument, onState) {
  let pause = 500;
  for (;;) {
    if (document.hidden) {
      onState("paused while hidden", false);
      await new Promise((seen) => document.addEventListener("visibilitychange", seen, {once: true}));
      continue;
    }
    const hidden = new AbortController();
    const hide = () => document.hidden && hidden.abort(new Error("hidden"));
    document.addEventListener("visibilitychange", hide);
    try {
      await follow(token, hidden.signal, (...given) => {
        pause = 500;
        onState("live", true);
        try {
          onDocument(...given);
        } catch (error) {
          reportError(error); // a fault of the page is no reason to connect again
        }
      });
    } catch (error) {
      if (error instanceof Unauthorized) throw error;
      if (!document.hidden) {
        onState("not connected, trying again", false, error.message);
        await new Promise((again) => setTimeout(again, pause * (0.75 + Math.random() / 2)));
        pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
  }
}
