//! The extension module `ferrule._native`: convert, detach, call, map the error; nothing else.

mod ceilings;
mod engine;
mod errors;
mod features;
mod fork;
mod gguf;
mod interrupt;
mod load;
mod lora;
mod outputs;
mod packing;
mod parameters;
mod processor;
mod stage;
mod structured;
mod tokenizer;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{ARITHMETIC_VERSION, LAYOUT_VERSION, machine};
use pyo3::prelude::*;

#[pyfunction]
fn isa() -> PyResult<&'static str> {
    Ok(errors::chosen_isa()?.name())
}

#[pyfunction]
fn isa_names() -> Vec<&'static str> {
    Isa::NAMES.to_vec()
}

#[pyfunction]
fn available_isas() -> Vec<&'static str> {
    Isa::available().into_iter().map(Isa::name).collect()
}

#[pyfunction]
fn cpu_count() -> usize {
    machine::cpu_count().get()
}

#[pyfunction]
fn available_memory() -> u64 {
    machine::available_memory()
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    fork::register(module.py())?;
    module.add("version", env!("CARGO_PKG_VERSION"))?;
    module.add("layout_version", LAYOUT_VERSION)?;
    module.add("arithmetic_version", ARITHMETIC_VERSION)?;
    module.add_class::<ceilings::Ceilings>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<gguf::GgufFile>()?;
    module.add_class::<lora::LoraAdapter>()?;
    module.add_class::<packing::PackedFile>()?;
    module.add_class::<structured::Grammar>()?;
    module.add_class::<structured::Vocabulary>()?;
    module.add_class::<outputs::StepOutput>()?;
    module.add_class::<outputs::TokenLogprobs>()?;
    module.add_class::<outputs::SampleTrace>()?;
    module.add_class::<outputs::Candidate>()?;
    module.add_class::<outputs::Beam>()?;
    module.add_class::<parameters::ParameterRow>()?;
    module.add_function(wrap_pyfunction!(parameters::sampling_parameters, module)?)?;
    module.add_function(wrap_pyfunction!(parameters::beam_search_parameters, module)?)?;
    module.add_function(wrap_pyfunction!(parameters::engine_options, module)?)?;
    module.add_function(wrap_pyfunction!(engine::sample_distribution, module)?)?;
    module.add_function(wrap_pyfunction!(load::measure, module)?)?;
    module.add_function(wrap_pyfunction!(stage::divide_layers, module)?)?;
    module.add_function(wrap_pyfunction!(stage::check_workers_memory, module)?)?;
    module.add_function(wrap_pyfunction!(stage::serve_stage, module)?)?;
    module.add_function(wrap_pyfunction!(packing::pack, module)?)?;
    module.add_function(wrap_pyfunction!(packing::allocate_bits, module)?)?;
    module.add_function(wrap_pyfunction!(packing::check_bits, module)?)?;
    module.add_function(wrap_pyfunction!(tokenizer::check_json, module)?)?;
    module.add_function(wrap_pyfunction!(tokenizer::check_map, module)?)?;
    module.add_function(wrap_pyfunction!(isa, module)?)?;
    module.add_function(wrap_pyfunction!(isa_names, module)?)?;
    module.add_function(wrap_pyfunction!(available_isas, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_count, module)?)?;
    module.add_function(wrap_pyfunction!(available_memory, module)?)
}
