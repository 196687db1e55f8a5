// A client of AWS Lambda's Runtime API for functions in JavaScript: CommonJS and ES modules, async
// and callback handlers, and handlers that stream their answer. Names, texts and log lines are
// those of AWS Lambda's runtime for Node.js 20, whose own client needs a compiler to install.
import fs from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import path from "node:path";
import { Writable } from "node:stream";
import { finished } from "node:stream/promises";
import { pathToFileURL } from "node:url";
import util from "node:util";

const [host, port] = process.env.AWS_LAMBDA_RUNTIME_API.split(":");
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
const root = process.env.LAMBDA_TASK_ROOT;
// By these a handler is marked that streams its answer.
const streaming = Symbol.for("aws.lambda.runtime.handler.streaming");
const highWaterMark = Symbol.for("aws.lambda.runtime.handler.streaming.highWaterMark");
let requestId = "undefined";
// The answer that the invocation streams.
let streamed;
// What happens when the event loop is empty.
let whenIdle = () => {};

class RuntimeError extends Error {
  constructor(name, message) {
    super(message);
    this.name = name;
  }
}

// A request whose body is yet to come, and its response.
function begin(method, name, headers) {
  const request = http.request({ agent, host, port, method, headers, path: `/2018-06-01/runtime/${name}` });
  const response = new Promise((resolve, reject) => {
    request.on("response", (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("end", () => resolve({ headers: response.headers, text: Buffer.concat(parts).toString() }));
      response.on("error", reject);
    });
    request.on("error", reject);
  });
  return { request, response };
}

function call(method, name, body, headers = {}) {
  const length = body === undefined ? {} : { "Content-Length": Buffer.byteLength(body) };
  const { request, response } = begin(method, name, { ...headers, ...length });
  request.end(body);
  return response;
}

// console.log and its siblings write one line each: time, request, level, message.
function line(level, text) {
  const whole = `${new Date().toISOString()}\t${requestId}\t${level}\t${text}`;
  process.stdout.write(`${whole.replace(/\n/g, "\r")}\n`);
}

for (const [name, level] of Object.entries({ log: "INFO", info: "INFO", warn: "WARN", error: "ERROR", debug: "DEBUG" })) {
  console[name] = (...parts) => line(level, util.format(...parts));
}
console.trace = (...parts) => {
  const trace = { name: "Trace", message: util.format(...parts) };
  Error.captureStackTrace(trace, console.trace);
  line("TRACE", trace.stack);
};

const isError = (value) => value instanceof Error || util.types.isNativeError(value);

function describe(error) {
  if (!isError(error)) {
    return { errorType: typeof error, errorMessage: String(error), trace: [] };
  }
  return { errorType: error.name, errorMessage: error.message, trace: String(error.stack ?? "").split("\n") };
}

function logError(what, error) {
  const { trace, ...document } = describe(error);
  let text = JSON.stringify({ ...document, stack: trace });
  try {
    text = JSON.stringify({ ...document, ...(isError(error) && error), stack: trace });
  } catch {
    // An error's own properties may have no JSON.
  }
  line("ERROR", `${what} \t${text}`);
}

const kindOf = ({ errorType }) => ({ "Lambda-Runtime-Function-Error-Type": encodeURIComponent(errorType) });

function post(name, error) {
  const document = describe(error);
  return call("POST", name, JSON.stringify(document), { "Content-Type": "application/json", ...kindOf(document) });
}

// An answer that is sent as it is written. The request begins with its first bytes, or its end.
class ResponseStream extends Writable {
  #type = "application/octet-stream";
  #prelude;
  #answer;
  #failure;

  constructor(highWaterMark) {
    super({ highWaterMark: Number.isInteger(highWaterMark) ? highWaterMark : 64 << 10 });
    // An error that nothing else listens to must not end the process: `finished` reports it.
    this.on("error", () => {});
  }

  write(chunk, ...rest) {
    return super.write(asText(chunk), ...rest);
  }

  end(chunk, ...rest) {
    const isNone = chunk === undefined || chunk === null || typeof chunk === "function";
    return super.end(isNone ? chunk : asText(chunk), ...rest);
  }

  setContentType(type) {
    if (this.#answer) {
      throw new RuntimeError("Runtime.InvalidStreamingOperation", "Cannot set content-type, too late.");
    }
    this.#type = type;
  }

  // A JSON document before the first bytes, and what separates it from them.
  setPrelude(document) {
    this.setContentType("application/vnd.awslambda.http-integration-response");
    this.#prelude = Buffer.concat([Buffer.from(JSON.stringify(document)), Buffer.alloc(8)]);
  }

  #begin() {
    if (!this.#answer) {
      this.#answer = begin("POST", `invocation/${requestId}/response`, {
        "Content-Type": this.#type,
        "Lambda-Runtime-Function-Response-Mode": "streaming",
        "Transfer-Encoding": "chunked",
        Trailer: "Lambda-Runtime-Function-Error-Type, Lambda-Runtime-Function-Error-Body",
      });
      // Also when nothing waits for it.
      this.#answer.response.catch((error) => this.destroy(error));
      if (this.#prelude) {
        this.#answer.request.write(this.#prelude);
      }
    }
    return this.#answer;
  }

  _write(bytes, _encoding, done) {
    this.#begin().request.write(bytes, done);
  }

  _final(done) {
    this.#finish();
    this.#answer.response.then(() => done(), done);
  }

  #finish() {
    const { request } = this.#begin();
    if (this.#failure) {
      const body = Buffer.from(JSON.stringify(this.#failure)).toString("base64");
      request.addTrailers({ ...kindOf(this.#failure), "Lambda-Runtime-Function-Error-Body": body });
    }
    request.end();
  }

  // Reports an error: after bytes of the answer, in its trailers.
  fail(error) {
    if (!this.#answer) {
      this.destroy();
      return post(`invocation/${requestId}/error`, error);
    }
    this.#failure = describe(error);
    if (this.destroyed) {
      this.#finish();
    } else {
      // After what was written before.
      super.end();
    }
    return this.#answer.response;
  }
}

const asText = (chunk) => (typeof chunk === "string" || chunk instanceof Uint8Array ? chunk : JSON.stringify(chunk));

// What functions find as AWS Lambda's global.
globalThis.awslambda = {
  streamifyResponse(handler, options) {
    handler[streaming] = "response";
    handler[highWaterMark] = options?.highWaterMark;
    return handler;
  },
  HttpResponseStream: class HttpResponseStream {
    static from(stream, prelude) {
      stream.setPrelude(prelude);
      return stream;
    }
  },
};

// The file of a module that the handler names, with the ways to load it that AWS Lambda tries.
async function load(module) {
  const file = path.resolve(root, module);
  const require = createRequire(import.meta.url);
  if (fs.existsSync(file) && fs.statSync(file).isFile()) {
    return require(file);
  }
  if (fs.existsSync(`${file}.js`) && !isModule(`${file}.js`)) {
    return require(`${file}.js`);
  }
  for (const ending of [".js", ".mjs"]) {
    if (fs.existsSync(file + ending)) {
      return import(pathToFileURL(file + ending));
    }
  }
  if (fs.existsSync(`${file}.cjs`)) {
    return require(`${file}.cjs`);
  }
  return require(require.resolve(module, { paths: [root, path.dirname(file)] }));
}

// Whether the nearest package.json declares that a .js file is an ES module.
function isModule(file) {
  for (let folder = path.dirname(file); ; folder = path.dirname(folder)) {
    const description = path.join(folder, "package.json");
    if (fs.existsSync(description)) {
      return JSON.parse(fs.readFileSync(description, "utf8")).type === "module";
    }
    if (folder === path.dirname(folder)) {
      return false;
    }
  }
}

async function findHandler(name) {
  if (name.includes("..")) {
    const text = `'${name}' is not a valid handler name. Use absolute paths when specifying root directories in handler names.`;
    throw new RuntimeError("Runtime.MalformedHandlerName", text);
  }
  const base = path.basename(name);
  const [, module, names] = /^([^.]*)\.(.*)$/.exec(base) ?? [];
  if (module === undefined) {
    throw new RuntimeError("Runtime.MalformedHandlerName", "Bad handler");
  }
  let found;
  try {
    found = await load(path.join(path.dirname(name), module));
  } catch (error) {
    if (error instanceof SyntaxError) {
      throw new RuntimeError("Runtime.UserCodeSyntaxError", String(error));
    }
    if (error?.code === "MODULE_NOT_FOUND") {
      throw new RuntimeError("Runtime.ImportModuleError", String(error));
    }
    throw error;
  }
  const handler = names.split(".").reduce((part, key) => part?.[key], found);
  if (handler === undefined || handler === null) {
    throw new RuntimeError("Runtime.HandlerNotFound", `${name} is undefined or not exported`);
  }
  if (typeof handler !== "function") {
    throw new RuntimeError("Runtime.HandlerNotFound", `${name} is not a function`);
  }
  return handler;
}

const parsed = (text) => (text ? JSON.parse(text) : undefined);

// The part of a context that all handlers get.
function describeInvocation(headers) {
  const deadline = Number(headers["lambda-runtime-deadline-ms"]);
  return {
    functionName: process.env.AWS_LAMBDA_FUNCTION_NAME,
    functionVersion: process.env.AWS_LAMBDA_FUNCTION_VERSION,
    memoryLimitInMB: process.env.AWS_LAMBDA_FUNCTION_MEMORY_SIZE,
    logGroupName: process.env.AWS_LAMBDA_LOG_GROUP_NAME,
    logStreamName: process.env.AWS_LAMBDA_LOG_STREAM_NAME,
    clientContext: parsed(headers["lambda-runtime-client-context"]),
    identity: parsed(headers["lambda-runtime-cognito-identity"]),
    invokedFunctionArn: headers["lambda-runtime-invoked-function-arn"],
    awsRequestId: requestId,
    getRemainingTimeInMillis: () => deadline - Date.now(),
  };
}

// Calls the handler and returns its answer. That of a callback waits until the event loop is empty,
// unless the context says otherwise.
function answer(handler, event, headers) {
  return new Promise((resolve, reject) => {
    let waits = true;
    let called;
    const done = (error, value) => (error === undefined || error === null ? resolve(value) : reject(error));
    const callback = (error, value) => {
      if (waits && (error === undefined || error === null)) {
        called = value;
      } else {
        done(error, value);
      }
    };
    const context = {
      get callbackWaitsForEmptyEventLoop() {
        return waits;
      },
      set callbackWaitsForEmptyEventLoop(value) {
        waits = value;
      },
      done,
      succeed: resolve,
      fail: (error) => reject(error ?? "handled"),
      ...describeInvocation(headers),
    };
    const returned = handler(event, context, callback);
    if (isPromise(returned)) {
      whenIdle = neverSettled;
      returned.then(resolve, reject);
    } else {
      whenIdle = () => resolve(called);
    }
  });
}

// Calls a handler that streams its answer, and waits for the end of both.
async function stream(handler, event, headers) {
  streamed = new ResponseStream(handler[highWaterMark]);
  const sent = finished(streamed);
  // A handler that fails may have caused it.
  sent.catch(() => {});
  const returned = handler(event, streamed, describeInvocation(headers));
  if (!isPromise(returned)) {
    throw "Streaming does not support non-async handlers.";
  }
  whenIdle = neverSettled;
  if ((await returned) !== undefined) {
    console.warn("Streaming handlers ignore return values.");
  }
  await sent;
}

const isPromise = (value) => typeof value?.then === "function";

function neverSettled() {
  const text =
    "The Lambda runtime client detected an unexpected Node.js exit code. This is most commonly caused by a Promise that was never settled. For more information, see https://nodejs.org/docs/latest/api/process.html#exit-codes";
  end("Runtime.NodeJsExit", new RuntimeError("Runtime.NodeJsExit", text), 13);
}

// Reports an error of the invocation, or of the initialisation before the first.
function report(error) {
  if (streamed) {
    return streamed.fail(error);
  }
  return post(requestId === "undefined" ? "init/error" : `invocation/${requestId}/error`, error);
}

async function end(what, error, code) {
  logError(what, error);
  await report(error).catch(() => {});
  process.exit(code);
}

process.on("beforeExit", () => whenIdle());
process.on("uncaughtException", (error) => end("Uncaught Exception", error, 129));
process.on("unhandledRejection", (reason) => {
  const error = new RuntimeError("Runtime.UnhandledPromiseRejection", isError(reason) ? reason.toString() : String(reason));
  error.reason = reason;
  end("Unhandled Promise Rejection", error, 128);
});

function serialise(value) {
  let body;
  try {
    body = JSON.stringify(value === undefined ? null : value);
  } catch {
    // Reported below, as what has no JSON without an exception.
  }
  if (body === undefined) {
    throw new Error("Unable to stringify response body");
  }
  return body;
}

async function serve(handler) {
  for (;;) {
    const next = await call("GET", "invocation/next");
    requestId = next.headers["lambda-runtime-aws-request-id"];
    process.env._X_AMZN_TRACE_ID = next.headers["lambda-runtime-trace-id"] ?? "";
    streamed = undefined;
    try {
      if (handler[streaming] === "response") {
        await stream(handler, JSON.parse(next.text), next.headers);
      } else {
        const body = serialise(await answer(handler, JSON.parse(next.text), next.headers));
        await call("POST", `invocation/${requestId}/response`, body, { "Content-Type": "application/json" });
      }
    } catch (error) {
      logError("Invoke Error", error);
      await report(error);
    }
  }
}

try {
  await serve(await findHandler(process.env._HANDLER));
} catch (error) {
  await end("Uncaught Exception", error, 1);
}
