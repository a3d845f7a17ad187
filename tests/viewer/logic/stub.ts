// A window without a screen, for the state of the page. Imported first, before any module of the page.

class Address {
  hash = "";
  search = "";
  pathname = "/";
  get href(): string {
    return `http://127.0.0.1:1/${this.search}${this.hash}`;
  }
}
const kept = new Map<string, string>();
const storage = { getItem: (key: string) => kept.get(key) ?? null, setItem: (key: string, value: string) => void kept.set(key, value) };
const listeners = new Map<string, () => void>();
const page = {
  location: new Address(),
  history: { state: null, replaceState: () => undefined, pushState: () => undefined },
  sessionStorage: storage,
  localStorage: storage,
  document: { documentElement: { dataset: {}, lang: "" }, getElementById: () => null },
  navigator: { language: "en" },
  matchMedia: () => ({ matches: false }),
  getComputedStyle: () => ({ getPropertyValue: () => "#336699" }),
  addEventListener: (name: string, listener: () => void) => void listeners.set(name, listener),
};
for (const [name, value] of Object.entries(page)) Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
(globalThis as any).window = globalThis;
