//! Options of some architectures: bidirectional attention, ALiBi slopes, attention sinks, multi-head latent attention.

use proptest::prelude::*;

use super::*;

/// Returns the slopes of ALiBi for a power of two of heads.
fn slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|head| (-8.0 * head as f32 / heads as f32).exp2()).collect()
}

/// Returns sink logits below, among and above the scores.
fn sinks(heads: usize) -> Vec<f32> {
    numbers(5, heads).iter().map(|x| 4.0 * x).collect()
}

fn with_all(mut case: Case) -> Case {
    case.slopes = Some(slopes(case.shape.heads));
    case.sinks = Some(sinks(case.shape.heads));
    case.shape.softcap = Some(3.0);
    case
}

/// Creates a store with K and V of every token, and the sequence in it.
fn filled<'a>(exec: &Exec<'_>, case: &'a Case) -> (Cached<'a>, KvStore) {
    let cached = Cached::new(case, 0);
    let mut store = case.store(cached.table.len());
    write(exec, &mut store, &[(&cached, 0..case.tokens)]);
    (cached, store)
}

/// Computes the output of some rows of a sequence whose tokens are all in the pages.
fn run_rows(isa: Isa, threads: usize, case: &Case, rows: Range<usize>) -> Vec<f32> {
    let pool = Pool::new(NonZeroUsize::new(threads).expect("some"));
    let cancel = Cancel::new();
    let exec = Exec { isa, pool: &pool, cancel: &cancel };
    let (cached, store) = filled(&exec, case);
    attend(&exec, &store, &[(&cached, rows)]).remove(0)
}

/// Checks that threads, other sequences and the number of requested rows change no bit, and that the output agrees with
/// the oracle.
fn check_bidirectional(mut case: Case) {
    case.shape.bidirectional = true;
    let wanted = oracle(&case, 0..case.tokens);
    let width = case.shape.heads * case.shape.value_dim;
    for isa in Isa::available() {
        let whole = run_rows(isa, 1, &case, 0..case.tokens);
        let what = format!("{} {case:?}", isa.name());
        assert_close(&whole, &wanted, &what);
        for (threads, first) in [(3, 0), (2, 1), (1, 255), (3, case.tokens - 7), (2, case.tokens - 1)] {
            let rows = run_rows(isa, threads, &case, first..case.tokens);
            assert_same_bits(&rows, &whole[first * width..], &format!("{what} from {first} on {threads} threads"));
        }
        let in_batch = run_in_batch(isa, 2, &case, case.tokens + 41);
        assert_same_bits(&in_batch, &whole, &format!("{what} in a batch"));
    }
}

#[test]
fn partitioning_changes_no_bit_with_slopes_and_sinks() {
    // Long enough that one task computes both heads of K and V.
    check_invariance(&with_all(Case::new(3, 20, None, KvFormat::F16, 830)));
    check_invariance(&with_all(Case::new(7, 16, Some(300), KvFormat::F32, 560)));
    check_invariance(&with_all(Case::new(2, 34, None, KvFormat::Int8, 830)));
    check_invariance(&with_all(Case::new(2, 16, Some(70), KvFormat::Int8, 560)));
}

#[test]
fn partitioning_changes_no_bit_with_chunks() {
    for (chunk, format) in [(1, KvFormat::F32), (70, KvFormat::Int8), (256, KvFormat::F16), (300, KvFormat::F32)] {
        let mut case = Case::new(3, 20, None, format, 830);
        case.shape.chunk = Some(chunk);
        check_invariance(&case);
    }
}

#[test]
fn partitioning_changes_no_bit_with_chosen_tokens() {
    for (sets, format) in [(1, KvFormat::F32), (2, KvFormat::F16), (2, KvFormat::Int8)] {
        let mut case = Case::new(3, 20, None, format, 830);
        case.sets = Some(sets);
        check_invariance(&case);
        case.sinks = Some(sinks(6));
        case.shape.window = Some(300);
        check_invariance(&Case { tokens: 560, ..case });
    }
}

/// Choosing all tokens is the same as choosing none, and tokens that are not chosen have no effect, even if they are
/// infinite or NaN.
#[test]
fn tokens_that_are_not_chosen_have_no_effect() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |f| (isa, *f))) {
        let case = Case { sets: Some(1), ..Case::new(2, 20, None, format, 600) };
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let (mut cached, mut store) = filled(&exec, &case);
        let clean = attend(&exec, &store, &[(&cached, 590..600)]).remove(0);
        let chosen: Vec<_> = (590..600).flat_map(|position| case.chosen(0, position)).collect();
        let [q_width, k_width, v_width] = case.widths();
        let stride = q_width + k_width + v_width;
        for token in (0..590).filter(|token| !chosen.contains(token)) {
            cached.qkv[token * stride + q_width..(token + 1) * stride].fill([f32::NAN, f32::INFINITY][token % 2]);
        }
        write(&exec, &mut store, &[(&cached, 0..600)]);
        assert_same_bits(&attend(&exec, &store, &[(&cached, 590..600)])[0], &clean, isa.name());

        let case = Case { sets: None, ..case };
        let (cached, store) = filled(&exec, &case);
        let all = Selection::from_tokens(2, 38, (0..20).map(|_| (0..600).collect()));
        let (q, width) = (gather(&[(&cached, 590..600)]), case.shape.heads * 20);
        let q = Rows::new(&q, stride, 0);
        let sequence = AttentionSequence { first_row: 0, rows: 10, first_position: 590, pages: &cached.table };
        let mut out = vec![f32::NAN; 10 * width];
        let shape = AttentionShape { selection: Some(&all), ..case.shape() };
        attention(&exec, q, &store, LAYER, &shape, &[sequence], &mut out).expect("attention");
        assert_same_bits(&out, &attend(&exec, &store, &[(&cached, 590..600)])[0], isa.name());
    }
}

#[test]
#[should_panic(expected = "2 heads of K and V cannot share 3 sets")]
fn sets_that_heads_cannot_share_are_refused() {
    run_chunks(Isa::best(), 1, &Case { sets: Some(3), ..Case::new(2, 16, None, KvFormat::F32, 8) }, 8);
}

#[test]
fn partitioning_changes_no_bit_with_bidirectional_attention() {
    check_bidirectional(Case::new(1, 16, None, KvFormat::F32, 530));
    check_bidirectional(Case::new(3, 33, Some(65), KvFormat::Bf16, 333));
    check_bidirectional(Case::new(2, 20, Some(300), KvFormat::Int8, 700));
    check_bidirectional(Case::new(2, 20, Some(usize::MAX), KvFormat::F16, 270));
    check_bidirectional(with_all(Case::new(7, 18, Some(1), KvFormat::F16, 300)));
    check_bidirectional(with_all(Case::new(5, 16, None, KvFormat::Int8, 530)));
    check_bidirectional(with_all(Case::new(5, 16, None, KvFormat::F32, 530)));
}

/// MLA (DeepSeek-V2): all heads of Q share one wide head of K and V.
#[test]
fn many_heads_share_one_latent_head() {
    for (heads, format) in [4, 128].into_iter().flat_map(|heads| KvFormat::ALL.iter().map(move |f| (heads, *f))) {
        let mut case = Case::new(1, 576, None, format, 290);
        case.shape = AttentionShape { heads, kv_heads: 1, value_dim: 512, ..case.shape };
        let wanted = oracle(&case, 285..290);
        // The queries of 128 heads are 85 MB, which take longer to make and to copy than to use.
        let cached = Cached::new(&case, 0);
        let pools = [1, 3].map(|threads| Pool::new(NonZeroUsize::new(threads).expect("some")));
        let cancel = Cancel::new();
        for isa in Isa::available() {
            let what = format!("{} {format:?}, {heads} heads", isa.name());
            let [one, three] = pools.each_ref().map(|pool| Exec { isa, pool, cancel: &cancel });
            let mut store = case.store(cached.table.len());
            write(&three, &mut store, &[(&cached, 0..case.tokens)]);
            let rows = attend(&one, &store, &[(&cached, 285..290)]).remove(0);
            assert_close(&rows, &wanted, &what);
            let last = attend(&three, &store, &[(&cached, 289..290)]).remove(0);
            assert_same_bits(&last, &rows[4 * heads * 512..], &what);
        }
    }
}

/// Bidirectional rows see only their window, even if tokens outside it are infinite or NaN.
#[test]
fn tokens_outside_the_window_have_no_effect() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |f| (isa, *f))) {
        let mut case = Case::new(2, 20, Some(9), format, 40);
        case.shape.bidirectional = true;
        let [q_width, k_width, v_width] = case.widths();
        let (stride, width) = (q_width + k_width + v_width, case.shape.heads * 20);
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let clean = run_rows(isa, 1, &case, 0..case.tokens);
        for (bad, token) in [(f32::NAN, 21), (f32::INFINITY, 5), (f32::NAN, 39)] {
            let mut cached = Cached::new(&case, 0);
            cached.qkv[token * stride + q_width..(token + 1) * stride].fill(bad);
            let out = step(&exec, &mut case.store(3), &[(&cached, 0..case.tokens)]).remove(0);
            for (position, (out, clean)) in out.chunks(width).zip(clean.chunks(width)).enumerate() {
                if position.abs_diff(token) < 9 {
                    assert!(out.iter().all(|x| x.is_nan()), "{}: row {position} sees {token}", isa.name());
                } else {
                    assert_same_bits(out, clean, isa.name());
                }
            }
        }
    }
}

/// Far from the start of a sequence, f32 cannot distinguish the products of a slope with neighbouring positions. The same
/// relative distances must give the same bits.
#[test]
fn slopes_are_exact_at_any_position() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| [(isa, KvFormat::F32), (isa, KvFormat::Int8)]) {
        let mut case = Case::new(3, 16, Some(300), format, 700);
        case.slopes = Some(slopes(6));
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let (cached, store) = filled(&exec, &case);
        let near = attend(&exec, &store, &[(&cached, 690..700)]).remove(0);
        let further = 60_000 * ATTENTION_BLOCK;
        let mut pages = vec![PAGE_NONE; further / PAGE_TOKENS];
        pages.extend(&cached.table);
        let sequence = AttentionSequence { first_row: 0, rows: 10, first_position: 690 + further, pages: &pages };
        let q = gather(&[(&cached, 690..700)]);
        let q = Rows::new(&q, case.widths().iter().sum(), 0);
        let mut far = vec![f32::NAN; near.len()];
        attention(&exec, q, &store, LAYER, &case.shape(), &[sequence], &mut far).expect("attention");
        assert_same_bits(&far, &near, isa.name());
    }
}

/// Slopes of 0 and sinks without weight have no effect; a sink that outweighs all tokens makes the output 0.
#[test]
fn extreme_slopes_and_sinks() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |f| (isa, *f))) {
        let mut case = Case::new(2, 20, None, format, 270);
        let without = run_chunks(isa, 2, &case, 270);
        case.slopes = Some(vec![0.0; 4]);
        for none in [f32::NEG_INFINITY, f32::MIN, -300.0] {
            case.sinks = Some(vec![none; 4]);
            assert_same_bits(&run_chunks(isa, 2, &case, 270), &without, &format!("{} {none}", isa.name()));
        }
        for all in [f32::INFINITY, f32::MAX, 300.0] {
            case.sinks = Some(vec![f32::NEG_INFINITY, all, all, all]);
            for (index, (got, without)) in run_chunks(isa, 2, &case, 270).iter().zip(&without).enumerate() {
                let wanted = if index % 80 < 20 { *without } else { 0.0 };
                assert!(*got == wanted, "{} {all}, element {index}: {got} for {wanted}", isa.name());
            }
        }
    }
}

/// A sink does not hide non-finite K and V.
#[test]
fn sinks_keep_nan() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |f| (isa, *f))) {
        let mut case = Case::new(2, 20, None, format, 20);
        case.sinks = Some(vec![300.0; 4]);
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let mut cached = Cached::new(&case, 0);
        let stride: usize = case.widths().iter().sum();
        let q_width = case.widths()[0];
        cached.qkv[..stride][q_width..].fill(f32::NAN);
        let out = step(&exec, &mut case.store(2), &[(&cached, 0..20)]).remove(0);
        assert!(out.iter().all(|x| x.is_nan()), "{} {format:?}", isa.name());
    }
}

#[test]
#[should_panic(expected = "sinks must have one element per head")]
fn sinks_of_the_wrong_length_are_refused() {
    let mut case = Case::new(2, 16, None, KvFormat::F32, 8);
    case.sinks = Some(vec![0.0; 3]);
    run_chunks(Isa::best(), 1, &case, 8);
}

#[test]
#[should_panic(expected = "slopes must have one element per head")]
fn slopes_of_the_wrong_length_are_refused() {
    let mut case = Case::new(2, 16, None, KvFormat::F32, 8);
    case.slopes = Some(vec![0.0; 5]);
    run_chunks(Isa::best(), 1, &case, 8);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_agrees_with_f64(
        (group, key_dim, value_dim) in (1usize..9, 1usize..70, 1usize..70),
        window in prop_oneof![Just(None), (1usize..400).prop_map(Some)],
        bidirectional in any::<bool>(),
        softcap in prop_oneof![Just(None), (0.5f32..20.0).prop_map(Some)],
        slopes in prop_oneof![Just(None), prop::collection::vec(-1f32..1.0, 16).prop_map(Some)],
        sinks in prop_oneof![Just(None), prop::collection::vec(-9f32..9.0, 16).prop_map(Some)],
        format in prop::sample::select(KvFormat::ALL.to_vec()),
        (tokens, chunk) in (1usize..520, 1usize..520),
        (threads, seed) in (1usize..4, 1u32..1000),
    ) {
        let mut case = Case { seed, ..Case::new(group, key_dim, window, format, tokens) };
        case.shape = AttentionShape { value_dim, bidirectional, softcap, ..case.shape };
        case.slopes = slopes.map(|slopes| slopes[..2 * group].to_vec());
        case.sinks = sinks.map(|sinks| sinks[..2 * group].to_vec());
        // With bidirectional attention, any number of trailing rows can be requested once K and V of all are written.
        let first = if bidirectional { chunk.min(tokens) - 1 } else { 0 };
        let wanted = oracle(&case, first..tokens);
        for isa in Isa::available() {
            let got = if bidirectional {
                run_rows(isa, threads, &case, first..tokens)
            } else {
                run_chunks(isa, threads, &case, chunk)
            };
            assert_close(&got, &wanted, &format!("{} {case:?}", isa.name()));
        }
    }
}
