//! Headers that are made at random along the structure of their format, and broken here and there, in any number.
//!
//! The suite reads some thousands; `FERRULE_FUZZ_INPUTS` asks for more, and `FERRULE_FUZZ_SEED` for others:
//!
//! ```text
//! FERRULE_FUZZ_INPUTS=10000000 cargo test --release -p ferrule-formats fuzz -- --nocapture
//! ```
//!
//! An input is made from a number alone, which is printed where the reader panics or lies about it.

mod gguf;
mod inputs;
mod safetensors;
