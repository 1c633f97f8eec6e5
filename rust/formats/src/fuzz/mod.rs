//! Fuzz tests: headers that are generated at random along the structure of their format, and damaged.
//!
//! The test suite reads some thousands; `FERRULE_FUZZ_INPUTS` asks for more, and `FERRULE_FUZZ_SEED` for others:
//!
//! ```text
//! FERRULE_FUZZ_INPUTS=10000000 cargo test --release -p ferrule-formats fuzz -- --nocapture
//! ```
//!
//! An input is generated from one number, which is printed if the reader panics or misreports it.

mod gguf;
mod inputs;
#[path = "../../../../fuzz/random.rs"]
mod random;
mod safetensors;
