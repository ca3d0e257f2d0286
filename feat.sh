cd /tmp/w/lead2
U="--rollout.urls [http://127.0.0.1:31777] --replay.probe_every 2"
OB="--objective"
./smoke.sh sis 2 $U --objective '{name: sis}' 
./smoke.sh rspo 2 $U --objective '{name: rspo}'
./smoke.sh dppo_topk 2 $U --objective '{name: dppo, params: {divergence: top_k_tv}}' --corrections '[]'
./smoke.sh ref 2 $U --objective '{name: grpo}' --corrections '[{name: kl_penalty}]' --reference.path /tmp/w/clone/runs/seed0/warm
./smoke.sh klr 2 $U --methods '[{name: kl_in_reward}]' --reference.path /tmp/w/clone/runs/seed0/warm
./smoke.sh gae 2 $U --objective '{name: ppo}' --advantage.name gae
./smoke.sh popo 2 $U --objective '{name: ppo}' --methods '[{name: popo}]'
./smoke.sh dyn 2 $U --objective '{name: dapo_dynamic}' --methods '[{name: dynamic_sampling},{name: overlong, params: {buffer: 8}}]'
./smoke.sh sched 2 $U --methods '[{name: length_lr},{name: vcpo}]'
