//! Integration tests of models, as one binary: linking is most of the time that a small one takes to build.

mod encoder;
mod nodes;
mod pages;
mod spec;
mod specs;
mod stages;
mod states;
mod steps;
