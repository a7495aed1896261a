// The one place that knows anywidget from inside, for the line and for the board.

/**
 * Have a model's messages heard, whatever anywidget does; then it can ask for what it missed. anywidget
 * gives up on a model whose script took more than two seconds to load, as on a busy machine: the model is
 * shown, and every message of its kernel is dropped from then on. So they go to the class below it.
 * Resolves to the real model; to nothing where there is none: messages go by anywidget alone.
 */
async function hearAlways(model, id) {
  const up = Object.getPrototypeOf;
  try {
    const real = await model.widget_manager.get_model(id);
    let type = up(real);
    while (!Object.hasOwn(type, "_handle_comm_msg")) type = up(type);
    const handle = up(type)._handle_comm_msg;
    if (handle) real.comm.on_msg((message) => handle.call(real, message));
    return real;
  } catch {}
}
