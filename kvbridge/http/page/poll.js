// What the daemon shows now, asked for again and again.

const INTERVAL_MS = 2000;
const LIMIT_MS = 6000;
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

// Asks as long as somebody sees the page, also over a restart of the daemon. Returns only by throwing Unauthorized.
// `onDocument(document)` is given what came; `onState(text, live)` says how it goes.
export async function listen(token, onDocument, onState) {
  let pause = 500;
  for (;;) {
    if (document.hidden) {
      onState("paused while hidden", false);
      await new Promise((seen) => document.addEventListener("visibilitychange", seen, {once: true}));
      continue;
    }
    let wait = INTERVAL_MS;
    try {
      const found = await (await call("v1/page", token, {signal: AbortSignal.timeout(LIMIT_MS)})).json();
      pause = 500;
      onState("live", true);
      try {
        onDocument(found);
      } catch (error) {
        reportError(error); // a fault of the page is no reason to say that the daemon is away
      }
    } catch (error) {
      if (error instanceof Unauthorized) throw error;
      onState("not connected, trying again", false, error.message);
      wait = pause * (0.75 + Math.random() / 2);
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
    await new Promise((again) => setTimeout(again, wait));
  }
}
