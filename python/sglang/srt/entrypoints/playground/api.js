// Requests to the server that this page came from. The key is an argument, kept by nobody here.

/** What the server refused or broke off; `status` is 0 for an error inside a stream. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server replied with status ${response.status}`, response.status);
}

/** What the server serves, and how. */
export async function serverInfo(key) {
  return (await checked(await fetch("server_info", { headers: headers(key) }))).json();
}

/** Objects of a streamed chat completion. Ends with `signal`; throws `ApiError`. */
export async function* streamChat(body, key, signal) {
  const init = { method: "POST", headers: headers(key), body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await checked(await fetch("v1/chat/completions", init));
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 0);
    yield event;
  }
  throw new ApiError("the stream ended before its end was announced", 0);
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    await reader.cancel();
  }
}
