// Search on a site that is opened from a file system. Browsers start no worker from a file: URL, so
// there the search runs in a hidden frame that has a worker's functions: importScripts, postMessage
// and message events.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.#deliver(data);
      scope.importScripts = (...urls) => urls.reduce(
        (before, next) => before.then(() => this.#load(next)), Promise.resolve());
      this.loaded = this.#load(url);
    }

    postMessage(data) {
      const scope = this.frame.contentWindow;
      const message = new scope.MessageEvent("message", { data: structuredClone(data) });
      this.loaded.then(() => scope.dispatchEvent(message));
    }

    terminate() {
      this.frame.remove();
    }

    #load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.contentDocument.body.append(script);
      });
    }

    #deliver(data) {
      const message = new MessageEvent("message", { data: structuredClone(data) });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    }
  };
}
