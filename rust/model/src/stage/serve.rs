//! Worker's end of the connection to the process that schedules; the frames are those of [`link`](super::link).

use std::collections::VecDeque;
use std::io::{BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};

use ferrule_kernels::Cancel;

use super::link::{ALLOCATE, ANSWER, COMPUTED_LOGITS, FAILURE, LOGITS, LOOK_UP, LOOKED_UP, RANK_LOST, STEP};
use super::link::{LinkError, StageInfo, read_bytes, read_numbers, read_word, to_word};
use super::{Stage, StageRunError, StageStep, StepError};

/// A request that a worker has received.
enum Request {
    Allocate(Vec<usize>),
    Step(StageStep, Vec<f32>),
    LookUp(Vec<u32>),
    Logits(Vec<f32>),
}

/// Runs a stage for the process at the other end of a connection, until that ends it. A thread receives requests while
/// the stage computes, so that the other end never waits to send, and another one looks up tokens. When the connection
/// ends, `cancel` is set, so that the stage does not wait for other workers.
///
/// # Errors
/// [`LinkError`] for a request that failed, which is also reported to the other end, and for a connection that ends
/// within a frame. The connection has ended then.
pub fn serve_stage(stage: &mut Stage, kv_budget: u64, stream: &UnixStream, cancel: &Cancel) -> Result<(), LinkError> {
    let (mut reader, mut writer) = (BufReader::new(stream), BufWriter::new(stream));
    let info =
        serde_json::to_vec(&StageInfo::new(stage, kv_budget)).expect("a description consists of numbers and names");
    writer.write_all(&(info.len() as u32).to_le_bytes())?;
    writer.write_all(&info)?;
    writer.flush()?;
    let (width, limits, token_rows) = (stage.input_width(), stage.kv_groups().len(), stage.token_rows());
    let writer = &Mutex::new(writer);
    std::thread::scope(|scope| {
        let (look_ups, tokens) = mpsc::channel::<Vec<u32>>();
        let looking_up = scope.spawn(move || {
            let served = tokens.into_iter().try_for_each(|tokens| {
                send_answer(writer, LOOKED_UP, caught(|| token_rows.read(&tokens).map_err(worker_error)))
            });
            if served.is_err() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            served
        });
        let (sender, requests) = mpsc::channel();
        scope.spawn(move || {
            loop {
                let request = receive_request(&mut reader, width, limits).transpose();
                let ends = !matches!(request, Some(Ok(_)));
                let is_sent = match request {
                    Some(Ok(Request::LookUp(tokens))) => look_ups.send(tokens).is_ok(),
                    Some(request) => sender.send(request).is_ok(),
                    None => false,
                };
                if ends || !is_sent {
                    cancel.cancel();
                    return;
                }
            }
        });
        let mut buffers = [Vec::new(), Vec::new()];
        let mut requests = logits_first(&requests);
        let served = requests.try_for_each(|request| answer(stage, request, cancel, writer, &mut buffers));
        // The threads that receive and look up must not wait for another request.
        let _ = stream.shutdown(Shutdown::Both);
        // What fails first closes the connection for the other.
        match (served, looking_up.join().expect("panics are caught")) {
            (Err(LinkError::Io(_)), Err(cause)) => Err(cause),
            (served, looked_up) => served.and(looked_up),
        }
    })
}

/// Returns the requests that arrive: those that wait for logits first, then the others in their order.
fn logits_first(
    requests: &mpsc::Receiver<Result<Request, LinkError>>,
) -> impl Iterator<Item = Result<Request, LinkError>> {
    let mut waiting = VecDeque::new();
    std::iter::from_fn(move || {
        if waiting.is_empty() {
            waiting.extend(requests.recv());
        }
        waiting.extend(requests.try_iter());
        let urgent = waiting.iter().position(|request| matches!(request, Ok(Request::Logits(_))));
        waiting.remove(urgent.unwrap_or(0))
    })
}

/// Sends the numbers of an answer, or the error in their place, and returns this error.
fn send_answer(
    writer: &Mutex<BufWriter<&UnixStream>>,
    kind: u32,
    numbers: Result<impl AsRef<[f32]>, LinkError>,
) -> Result<(), LinkError> {
    let writer = &mut *writer.lock().unwrap_or_else(PoisonError::into_inner);
    match &numbers {
        Ok(numbers) => {
            let numbers = numbers.as_ref();
            write_frame(writer, kind, numbers.len(), bytemuck::cast_slice(numbers))?;
        }
        Err(LinkError::RankLost { rank }) => write_frame(writer, RANK_LOST, *rank, &[])?,
        Err(error) => {
            let message = error.to_string();
            write_frame(writer, FAILURE, message.len(), message.as_bytes())?;
        }
    }
    numbers.map(drop)
}

/// Returns what a worker reports of an error.
fn failure(error: StageRunError) -> LinkError {
    match error {
        StageRunError::RankLost { rank } => LinkError::RankLost { rank },
        error => worker_error(error),
    }
}

/// Does what a request asks for, and sends the answer. After a step of the last stage, sends the logits too. The buffers
/// are reused from request to request, since logits are megabytes.
fn answer(
    stage: &mut Stage,
    request: Result<Request, LinkError>,
    cancel: &Cancel,
    writer: &Mutex<BufWriter<&UnixStream>>,
    [output, logits]: &mut [Vec<f32>; 2],
) -> Result<(), LinkError> {
    let (mut kind, mut has_logits) = (ANSWER, false);
    output.clear();
    let done = request.and_then(|request| {
        caught(|| match request {
            Request::Allocate(pages) => stage.allocate_kv(&pages).map_err(worker_error),
            Request::Step(step, input) => {
                has_logits = stage.continues_with_logits(&step);
                stage.step(&step, &input, cancel, output).map_err(failure)
            }
            Request::Logits(rows) => {
                kind = COMPUTED_LOGITS;
                stage.logits(&rows, cancel, logits).map_err(failure)
            }
            Request::LookUp(_) => unreachable!("another thread looks up tokens"),
        })
    });
    let done = done.map(|()| match kind {
        COMPUTED_LOGITS => &logits[..],
        // All workers of a stage have the same output.
        _ if stage.rank() > 0 => &[],
        _ => &output[..],
    });
    send_answer(writer, kind, done)?;
    if !has_logits {
        return Ok(());
    }
    let done = caught(|| stage.logits(output, cancel, logits).map_err(failure));
    send_answer(writer, COMPUTED_LOGITS, done.map(|()| &logits[..]))
}

/// Runs `work`; a panic is an error.
fn caught<T>(work: impl FnOnce() -> Result<T, LinkError>) -> Result<T, LinkError> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(LinkError::Worker("the stage panicked".to_owned())))
}

/// Returns an error of the worker with the message of `error`.
fn worker_error(error: impl std::fmt::Display) -> LinkError {
    LinkError::Worker(error.to_string())
}

/// Receives a request for a stage that reads `width` numbers per token and has `groups` groups; `None` if the
/// connection ended between two requests.
fn receive_request(reader: &mut impl Read, width: usize, groups: usize) -> Result<Option<Request>, LinkError> {
    let mut kind = [0; 4];
    if reader.read(&mut kind[..1])? == 0 {
        return Ok(None);
    }
    reader.read_exact(&mut kind[1..])?;
    let [first, second] = [read_word(reader)? as usize, read_word(reader)? as usize];
    match u32::from_le_bytes(kind) {
        ALLOCATE if first == groups => {
            let mut pages = vec![[0; 8]; groups];
            reader.read_exact(pages.as_flattened_mut())?;
            let pages = pages.into_iter().map(|pages| usize::try_from(u64::from_le_bytes(pages)).unwrap_or(usize::MAX));
            Ok(Some(Request::Allocate(pages.collect())))
        }
        STEP => {
            let step = StageStep::from_bytes(&read_bytes(reader, first)?);
            let step = step.map_err(|error: StepError| LinkError::Protocol(error.to_string()))?;
            let tokens: usize = step.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            let expected = tokens.saturating_mul(width);
            if second != expected {
                let what = format!("{second} hidden states for {tokens} tokens, not {expected}");
                return Err(LinkError::Protocol(what));
            }
            let mut input = vec![0.0; expected];
            reader.read_exact(bytemuck::cast_slice_mut(&mut input))?;
            Ok(Some(Request::Step(step, input)))
        }
        LOOK_UP if second == 0 => {
            let bytes = read_bytes(reader, first.saturating_mul(size_of::<u32>()))?;
            let (tokens, _) = bytes.as_chunks();
            Ok(Some(Request::LookUp(tokens.iter().map(|token| u32::from_le_bytes(*token)).collect())))
        }
        LOGITS if second == 0 => Ok(Some(Request::Logits(read_numbers(reader, first)?))),
        kind => Err(LinkError::Protocol(format!("request {kind} with {first} and {second}"))),
    }
}

fn write_frame(writer: &mut impl Write, kind: u32, count: usize, bytes: &[u8]) -> Result<(), LinkError> {
    writer.write_all(&kind.to_le_bytes())?;
    writer.write_all(&to_word(count)?.to_le_bytes())?;
    writer.write_all(bytes)?;
    Ok(writer.flush()?)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;
    use std::time::Duration;

    use ferrule_kernels::Pool;
    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::kv::KvFormat;

    use super::*;
    use crate::batch::{Batch, LogitRows, SequenceChunk};
    use crate::quantization::Quantization;
    use crate::spec::ModelSpec;
    use crate::specs;
    use crate::stage::link::{Answer, StageLink};
    use crate::stage::{LastOutput, StagePart, TensorParallelGroup};
    use crate::transformer::LoadOptions;
    use crate::weights::Source;

    fn spec() -> ModelSpec {
        ModelSpec::from_json(&specs::llama(96, 2).to_string()).unwrap()
    }

    /// Loads a stage that has all layers, and the last of `stages` parts of the vocabulary.
    fn load(stages: usize, group: Option<TensorParallelGroup>) -> Stage {
        let quantization = Quantization::named("int8").unwrap();
        let options = LoadOptions { quantization, kv_format: KvFormat::F16, isa: Isa::best() };
        let part = StagePart { layers: 0..2, stage: stages - 1, stages, group };
        let pool = Arc::new(Pool::new(NonZeroUsize::MIN));
        Stage::load(spec(), part, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap()
    }

    /// Returns the bytes of a step with one prompt.
    fn step() -> Vec<u8> {
        let prompt = SequenceChunk {
            tokens: &[3, 1, 4],
            first_position: 0,
            prompt_len: 3,
            pages: &[vec![0]],
            token_types: &[],
            logits: LogitRows::Last,
            adapter: None,
        };
        StageStep::new(Batch { sequences: &[prompt] }, Vec::new(), LastOutput::Logits).to_bytes()
    }

    #[test]
    fn steps_look_ups_and_logits_have_answers_of_their_own() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || serve_stage(&mut load(2, None), 1 << 20, &theirs, &Cancel::new()));
        let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
        assert_eq!((link.info().first_token, link.info().end_token), (48, 96));
        let width = spec().embedding_width();
        link.allocate_kv(&[4], &Cancel::new()).unwrap();
        link.send_step(&step(), &vec![0.5; 3 * width]).unwrap();
        link.send_look_up(&[48, 95]).unwrap();
        link.send_logits(&vec![0.25; 2 * width]).unwrap();
        let mut sizes = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..4 {
            let (kind, numbers) = match link.receive(&Cancel::new()).unwrap() {
                Answer::Output(rows) => (0, rows),
                Answer::LookedUp(rows) => (1, rows),
                Answer::Logits(logits) => (2, logits),
            };
            sizes[kind].push(numbers.len());
        }
        // The logits of the step follow its hidden states; the other ones come first if their request is there in time.
        sizes[2].sort_unstable();
        assert_eq!(sizes, [vec![width], vec![2 * width], vec![48, 2 * 48]]);
        link.send_look_up(&[95, 96]).unwrap();
        let error = link.receive(&Cancel::new()).err().unwrap().to_string();
        assert!(error.contains("tokens[1] must be in 48..96, the rows of this worker, got 96"), "{error}");
        assert!(link.receive(&Cancel::new()).is_err(), "the worker has ended");
    }

    #[test]
    fn logits_are_computed_before_the_steps_that_wait() {
        let (sender, requests) = mpsc::channel();
        let step = || Request::Step(StageStep::from_bytes(&step()).unwrap(), Vec::new());
        for request in [step(), Request::Logits(vec![1.0]), step(), Request::Logits(vec![2.0])] {
            sender.send(Ok(request)).unwrap();
        }
        drop(sender);
        let name = |request| match request {
            Ok(Request::Logits(rows)) => format!("{rows:?}"),
            Ok(Request::Step(..)) => "step".to_owned(),
            _ => "another request".to_owned(),
        };
        let order: Vec<String> = logits_first(&requests).map(name).collect();
        assert_eq!(order, ["[1.0]", "[2.0]", "step", "step"]);
    }

    #[test]
    fn a_worker_that_waits_for_another_ends_with_the_connection_to_the_engine() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The other rank never answers.
        let (peer, silent) = UnixStream::pair().unwrap();
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            let mut stage = load(1, Some(TensorParallelGroup::new(0, vec![peer]).unwrap()));
            ended.send(serve_stage(&mut stage, 1 << 20, &theirs, &Cancel::new())).unwrap();
        });
        let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
        link.allocate_kv(&[4], &Cancel::new()).unwrap();
        link.send_step(&step(), &[]).unwrap();
        assert!(end.recv_timeout(Duration::from_millis(300)).is_err(), "the worker waits for the other rank");
        drop(link);
        let served = end.recv_timeout(Duration::from_secs(60)).expect("the worker ends");
        assert!(served.is_err());
        drop(silent);
    }
}
