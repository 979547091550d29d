// The server's OpenAI API: the model, and one streamed answer at a time.

export class ApiError extends Error {}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  throw new ApiError(message);
}

async function ask(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached; is it still running?");
  }
}

export async function model(key) {
  const response = await ask("/v1/models", { headers: headers(key) });
  return (await response.json()).data[0];
}

// Calls `onText(piece, tokens so far)` as text comes, a piece may be of several tokens; gives {usage, seconds, firstSeconds,
// finish} at the end. `signal` stops it.
export async function answer(messages, sampling, key, signal, onText) {
  const started = performance.now();
  const options = { include_usage: true, continuous_usage_stats: true };
  const body = { messages, stream: true, stream_options: options, ...sampling };
  const response = await ask("/v1/chat/completions",
                             { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  const result = { usage: null, firstSeconds: null, decodeSeconds: 0, finish: null };
  let done = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") { done = true; break; }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    if (chunk.usage) result.usage = chunk.usage;
    for (const choice of chunk.choices) {
      if (choice.finish_reason) result.finish = choice.finish_reason;
      if (!choice.delta.content) continue;
      const now = (performance.now() - started) / 1000;
      result.firstSeconds ??= now;
      result.decodeSeconds = now - result.firstSeconds;
      onText(choice.delta.content, chunk.usage?.completion_tokens ?? 0);
    }
  }
  if (!done) throw new ApiError("the connection broke off in the middle of the answer");
  return result;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (data) yield data;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the connection broke off in the middle of the answer");
  } finally {
    reader.cancel().catch(() => {});
  }
}
