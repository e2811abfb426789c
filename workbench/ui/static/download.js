// Hands the user the files that Python sends: {event: "download", name, type} with their content. Returns what ends it.
function serveDownloads(model) {
  const receive = (message, buffers) => {
    if (message.event === "download") download(message, buffers[0]);
  };
  model.on("msg:custom", receive);
  return () => model.off("msg:custom", receive);
}

function download({ name, type }, data) {
  const url = URL.createObjectURL(new Blob([data], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
