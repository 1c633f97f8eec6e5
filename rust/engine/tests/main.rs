//! Integration tests of the engine, as one binary: linking is most of the time that a small one takes to build.

mod adapters;
mod beams;
mod builder;
mod encode;
mod engine;
mod fake;
mod features;
mod fuzz_seeds;
mod in_flight;
mod large_rows;
mod pipeline;
mod prefix;
mod sampling;
mod scheduling;
mod speculation;
