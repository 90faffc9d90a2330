// The server: plain requests, and streams of events read with fetch, so that POST, a token and cancelling all work.

const token = new URLSearchParams(location.search).get("token");

function headers() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not respond. Is it still running?", 0);
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not JSON of this service: the status has to suffice.
  }
  const wait = response.headers.get("Retry-After");
  if (wait) message += ` (try again in ${wait} s)`;
  throw new ServerError(message, response.status);
}

export async function get(path) {
  return (await send(path)).json();
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return (await send(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** Yields the chunks of a stream with drafts until [DONE]; an error is thrown. */
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true, stream_drafts: true }),
    signal,
  });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue; // a keep-alive, or the blank line after an event
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 500);
    yield chunk;
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield part.replace(/\r$/, "");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Best effort: the job may be over already, and closing the stream ends it too. */
export function cancelJob(id) {
  fetch(`/v1/jobs/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers(), keepalive: true }).catch(() => {});
}
