//! Pipeline stages: a stage that runs in this process, and the connections of an engine to stages in other processes.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use ferrule_kernels::Cancel;
use ferrule_model::{PipelineError, StageLink, StagePart, TensorParallelGroup, Worker};
use pyo3::prelude::*;

use crate::errors;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::load::LoadArguments;

/// Returns a stream over a duplicate of a connected socket, which Python keeps open.
pub(crate) fn stream(socket: i32) -> PyResult<UnixStream> {
    if socket < 0 {
        return Err(errors::invalid("socket", socket, "an open socket"));
    }
    // SAFETY: the borrow ends within this function. A number that is not open is reported by the system.
    let duplicate = unsafe { BorrowedFd::borrow_raw(socket) }.try_clone_to_owned();
    Ok(UnixStream::from(duplicate?))
}

/// Returns the links over streams to the workers of stages, first to last, once each of them has described itself. A
/// stage has `ranks` workers.
pub(crate) fn links(
    streams: Vec<UnixStream>,
    ranks: NonZeroUsize,
    cancel: &Cancel,
) -> Result<Vec<StageLink>, PipelineError> {
    let open = |(index, stream): (usize, UnixStream)| {
        let worker = Worker::new(index, ranks.get());
        StageLink::open(stream, cancel).map_err(|error| PipelineError::Link { worker, error })
    };
    streams.into_iter().enumerate().map(open).collect()
}

/// Loads layers of a model, and runs them for the engine at the other end of a socket until it closes the connection.
///
/// `stage` is the index of the stage, and the number of stages. `peers` are sockets to the other workers that divide the
/// rows of the matrices, by rank; `rank` is that of this one.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
#[pyo3(signature = (spec, weights, options, layers, stage, rank, peers, sharers, socket))]
pub(crate) fn serve_stage(
    py: Python<'_>,
    spec: &str,
    weights: Option<&str>,
    options: &str,
    layers: (usize, usize),
    stage: (usize, usize),
    rank: usize,
    peers: Vec<i32>,
    sharers: NonZeroUsize,
    socket: i32,
) -> PyResult<()> {
    let model = LoadArguments::read(spec, weights, options)?;
    let isa = errors::chosen_isa()?;
    let interrupt = Interrupt::new();
    let (socket, peers) = (stream(socket)?, peers.into_iter().map(stream).collect::<PyResult<Vec<_>>>()?);
    if rank > peers.len() {
        return Err(errors::invalid("rank", rank, format!("at most {}, the number of other workers", peers.len())));
    }
    let group = if peers.is_empty() { None } else { Some(TensorParallelGroup::new(rank, peers)?) };
    let part = StagePart { layers: layers.0..layers.1, stage: stage.0, stages: stage.1, group };
    let loaded = py.detach(|| {
        let _guard = fork::hold_off_forks();
        model.builder().isa(isa).cancel(&interrupt.cancel).load_stage(part, sharers)
    });
    let (mut stage, kv_budget) = loaded.map_err(|error| interrupt.build_error(&error))?;
    interrupt.settle(py);
    // A fork does not wait for this call, which lasts as long as the engine.
    let served = py.detach(|| ferrule_model::serve_stage(&mut stage, kv_budget, &socket, &interrupt.cancel));
    served.map_err(|error| errors::EngineError::new_err(error.to_string()))
}

/// Divides the layers of a model into pipeline stages; returns the first layer of each and the one after its last.
#[pyfunction]
#[pyo3(signature = (spec, weights, options, stages))]
pub(crate) fn divide_layers(
    py: Python<'_>,
    spec: &str,
    weights: Option<&str>,
    options: &str,
    stages: usize,
) -> PyResult<Vec<(usize, usize)>> {
    let model = LoadArguments::read(spec, weights, options)?;
    let divided = py.detach(|| {
        let _guard = fork::hold_off_forks();
        model.builder().divide(stages)
    });
    let ranges = divided.map_err(|error| errors::build_error(&error))?;
    Ok(ranges.into_iter().map(|range| (range.start, range.end)).collect())
}

/// Checks that the memory of this machine holds the weights of these workers together. Each has the first layer of its
/// stage and the one after the last, the index of its stage and the number of stages, and its rank and the number of ranks.
#[pyfunction]
#[pyo3(signature = (spec, weights, options, workers))]
pub(crate) fn check_workers_memory(
    py: Python<'_>,
    spec: &str,
    weights: Option<&str>,
    options: &str,
    workers: Vec<[(usize, usize); 3]>,
) -> PyResult<()> {
    let model = LoadArguments::read(spec, weights, options)?;
    if let Some([.., (rank, ranks)]) = workers.iter().find(|[.., (rank, ranks)]| rank >= ranks) {
        return Err(errors::invalid("rank", *rank, format!("less than {ranks}, the number of ranks")));
    }
    let part = |[layers, (stage, stages), (rank, ranks)]: [(usize, usize); 3]| StagePart {
        layers: layers.0..layers.1,
        stage,
        stages,
        group: (ranks > 1).then(|| TensorParallelGroup::unconnected(rank, ranks)),
    };
    let checked = py.detach(|| {
        let _guard = fork::hold_off_forks();
        model.builder().check_memory(workers.into_iter().map(part))
    });
    checked.map_err(|error| errors::build_error(&error))
}
