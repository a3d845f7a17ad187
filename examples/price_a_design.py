import headwise as hw

presets = {name: hw.design(preset=name, model=4096, heads=32) for name in ("gqa", "mla", "moh")}
window = hw.design(
    model=4096, heads=32, kv=8, pattern="window(1024) | first(4)", modifiers=(hw.parts.Rotary(),)
)
print(hw.cost({**presets, "window": window}, hw.Workload(context=32_768, batch=8)))
print(
    hw.why(window, tokens=2048)
)  # the backend that would run it here, and why the others would not
