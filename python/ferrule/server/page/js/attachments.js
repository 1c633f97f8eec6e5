// Attachments of a message: text files, and the text of PDF files, which the server of the page extracts.

import { extractPdfText } from "./api.js";

const MAX_BYTES = 8 * 1024 * 1024;
const MAX_CHARACTERS = 2_000_000;
const PDF = /\.pdf$/i;

/** Reads a file to an attachment, `{name, text}`; throws an Error that names the file. */
export async function readAttachment(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is too large: ${formatSize(file.size)} of at most 8 MB`);
  const isPdf = file.type === "application/pdf" || PDF.test(file.name);
  const text = isPdf ? await pdfText(file) : decode(file.name, await file.arrayBuffer());
  if (text.trim() === "") throw new Error(`${file.name} has no text`);
  if (text.length > MAX_CHARACTERS) throw new Error(`${file.name} has more than 2,000,000 characters`);
  return { name: file.name, text };
}

async function pdfText(file) {
  try {
    return (await extractPdfText(file)).text;
  } catch (error) {
    throw new Error(`${file.name}: ${error.message}`);
  }
}

function decode(name, bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch {
    // Not UTF-8.
  }
  throw new Error(`${name} is not a text file in UTF-8 or a PDF file`);
}

/** Returns the text of a message as the model gets it: the attachments, then the message. */
export function messageText({ content, attachments = [] }) {
  const documents = attachments.map(({ name, text }) => {
    return `<document name="${name.replaceAll(/["<>\n]/g, "_")}">\n${text.trimEnd()}\n</document>\n\n`;
  });
  return `${documents.join("")}${content}`;
}

/** Returns the size of an attachment's text as a text. */
export function attachmentSize({ text }) {
  return formatSize(new Blob([text]).size);
}

function formatSize(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
