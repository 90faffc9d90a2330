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

/** Yields {event, data} until the server closes the stream; an `error` event is thrown. */
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const { event, data } of events(response.body)) {
    const value = JSON.parse(data);
    if (event === "error") throw new ServerError(value.error.message, 500);
    yield { event, data: value };
  }
}

async function* events(body) {
  let event = "message";
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield { event, data: data.join("\n") };
      event = "message";
      data = [];
    } else if (line.startsWith("event:")) {
      event = line.slice(6).trim();
    } else if (line.startsWith("data:")) {
      data.push(line.slice(5).replace(/^ /, ""));
    }
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
