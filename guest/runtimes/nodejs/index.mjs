// A client of AWS Lambda's Runtime API for functions in JavaScript: CommonJS and ES modules, async
// and callback handlers. Names, texts and log lines are those of AWS Lambda's runtime for Node.js
// 20, whose own client needs a compiler to install.
import fs from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";
import util from "node:util";

const [host, port] = process.env.AWS_LAMBDA_RUNTIME_API.split(":");
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
const root = process.env.LAMBDA_TASK_ROOT;
let requestId = "undefined";
// What happens when the event loop is empty.
let whenIdle = () => {};

class RuntimeError extends Error {
  constructor(name, message) {
    super(message);
    this.name = name;
  }
}

function call(method, name, body, headers = {}) {
  return new Promise((resolve, reject) => {
    const length = body === undefined ? {} : { "Content-Length": Buffer.byteLength(body) };
    const options = { agent, host, port, method, headers: { ...headers, ...length } };
    const request = http.request({ ...options, path: `/2018-06-01/runtime/${name}` }, (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("end", () => resolve({ headers: response.headers, text: Buffer.concat(parts).toString() }));
      response.on("error", reject);
    });
    request.on("error", reject);
    request.end(body);
  });
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

function post(name, error) {
  const document = describe(error);
  const kind = { "Lambda-Runtime-Function-Error-Type": encodeURIComponent(document.errorType) };
  return call("POST", name, JSON.stringify(document), { "Content-Type": "application/json", ...kind });
}

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
    const deadline = Number(headers["lambda-runtime-deadline-ms"]);
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
    const returned = handler(event, context, callback);
    const isPromise = typeof returned?.then === "function";
    whenIdle = () => {
      if (!isPromise) {
        return resolve(called);
      }
      const text =
        "The Lambda runtime client detected an unexpected Node.js exit code. This is most commonly caused by a Promise that was never settled. For more information, see https://nodejs.org/docs/latest/api/process.html#exit-codes";
      end("Runtime.NodeJsExit", new RuntimeError("Runtime.NodeJsExit", text), 13);
    };
    if (isPromise) {
      returned.then(resolve, reject);
    }
  });
}

async function end(what, error, code) {
  logError(what, error);
  const name = requestId === "undefined" ? "init/error" : `invocation/${requestId}/error`;
  await post(name, error).catch(() => {});
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
    try {
      const body = serialise(await answer(handler, JSON.parse(next.text), next.headers));
      await call("POST", `invocation/${requestId}/response`, body, { "Content-Type": "application/json" });
    } catch (error) {
      logError("Invoke Error", error);
      await post(`invocation/${requestId}/error`, error);
    }
  }
}

try {
  await serve(await findHandler(process.env._HANDLER));
} catch (error) {
  await end("Uncaught Exception", error, 1);
}
