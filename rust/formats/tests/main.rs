//! Integration tests of file formats, as one binary: linking is most of the time that a small one takes to build.

mod contents;
mod folder_faults;
mod fuzz_seeds;
mod gguf;
mod gguf_faults;
mod header_faults;
mod module_cycles;
mod packed;
mod quantized;
mod quantized_faults;
mod support;
mod tables;
mod tokenizer_json;
