// Search in pages that are opened as files: browsers start no worker from there, so that a hidden
// frame takes its place. Material's search calls postMessage, onmessage and importScripts only.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          inside.document.body.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = inside;
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
    terminate() {}
  };
}
